"""What an engine's server holds at the moment, and whether requests may begin on it: shared by the engine's parts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from towline.contract.task import Cut
from towline.delta.state import ModelState, TensorSpec
from towline.engine.sglang.stream import Label


@dataclass(slots=True, eq=False)
class Served:
    """`version`, `state` and `label` change together, once the server has taken them."""

    version: int | None = None
    state: ModelState = field(default_factory=dict)
    label: str = ""
    """SGLang's weight_version, and the salt of its caches."""
    labels: dict[str, Label] = field(default_factory=dict)
    """Each that was ever given, for streams that began on earlier ones."""
    layout: list[TensorSpec] = field(default_factory=list)
    vocabulary: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether streams may begin."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by whoever changes the weights or the process."""

    def new_label(self, version: int, cut: Cut) -> str:
        label = f"{version}-{len(self.labels)}"
        self.labels[label] = Label(version, cut)
        return label
