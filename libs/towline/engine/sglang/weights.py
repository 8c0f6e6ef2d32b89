"""The files that engine and server share on this host: the changed tensors, the loader's command and the ranks' answers.

DIRECTORY/next/model.safetensors holds the changed tensors alone; the loader and an overlay read the same one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from towline.delta.files import save_folder, write_safetensors
from towline.delta.state import ModelState, TensorSpec, layout_of
from towline.engine.sglang.client import SglangClient
from towline.engine.sglang.command import LOADER
from towline.errors import EngineError

_STATUS = "status.rank{}.json"
Way: TypeAlias = Literal["loader", "overlay", "tensors"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks said. `written`: a write began, so after a failure the live weights may be mixed. `ranks`: each one's
    slices, as `towline.engine.sglang.digests` reads them; None where they weren't asked. `lost`: the server went away."""

    error: str | None
    written: bool
    lost: bool = False
    ranks: list[dict[str, list[Any]]] | None = None


class WeightFiles:
    """The folder that server and engine share on this host."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.command = directory / "command.json"
        self._ids = 0

    def prepare(self) -> None:
        """Empty it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)

    def write_changed(self, state: ModelState, names: Iterable[str]) -> Path:
        """The folder with these tensors. Blocks."""
        chosen = {name: state[name] for name in names}
        folder = self.directory / "next"
        folder.mkdir(exist_ok=True)
        write_safetensors(chosen, folder / "model.safetensors", {"format": "pt"})
        return folder

    def write_full(self, base: Path, state: ModelState) -> Path:
        """A Hugging Face folder of `state` with the base model's other files, for a server's start. Blocks."""
        folder = self.directory / "full"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for file in base.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                (folder / file.name).symlink_to(file.resolve())
        save_folder(state, folder)
        return folder

    async def load(
        self, client: SglangClient, state: ModelState, folder: Path | None, *, ranks: int, label: str | None, flush: bool,
        digest: bool,
    ) -> Outcome:  # fmt: skip
        """By the loader: write the folder's tensors (None: none), answer the digests of all. Connection errors are raised."""
        self._ids += 1
        for old in self.directory.glob(_STATUS.format("*")):
            old.unlink()
        self._command(
            {
                "id": self._ids,
                "path": None if folder is None else str(folder / "model.safetensors"),
                "layout": {spec.name: [spec.dtype, list(spec.shape)] for spec in layout_of(state)},
                "digest": digest,
            }
        )
        refused: str | None = None
        try:
            await client.run_loader(LOADER, ranks=ranks, label=label, flush=flush)
        except EngineError as error:
            refused = error.message
        statuses = self._statuses(ranks)
        if statuses is None:
            # Nobody can say what was written, unless it was refused before any rank began.
            begun = refused is None or any(self.directory.glob(_STATUS.format("*")))
            return Outcome(refused or "the loader in the server left no status", written=begun)
        failed = next((str(status["error"]) for status in statuses if not status["ok"]), refused)
        slices = [status["slices"] for status in statuses]
        written = any(status["written"] for status in statuses)
        return Outcome(failed, written, ranks=None if None in slices else slices)

    def _command(self, command: dict[str, Any]) -> None:
        temporary = self.command.with_suffix(".tmp")
        temporary.write_text(json.dumps(command))
        os.replace(temporary, self.command)

    def _statuses(self, ranks: int) -> list[dict[str, Any]] | None:
        files = [self.directory / _STATUS.format(rank) for rank in range(ranks)]
        if not all(file.exists() for file in files):
            return None
        statuses = [json.loads(file.read_bytes()) for file in files]
        return statuses if all(status["id"] == self._ids for status in statuses) else None


def check_layout(layout: list[TensorSpec], state: ModelState, changed: set[str] | None) -> list[str]:
    """The names to write. `EngineError` where the state isn't the served model's: a wrong shape would end the server."""
    specs = {spec.name: spec for spec in layout}
    if specs.keys() != state.keys():
        name = min(specs.keys() ^ state.keys())
        raise EngineError(f"tensor {name!r} is in only one of the served model and the version", code="weights_layout")
    for name, spec in specs.items():
        if state[name].spec != spec:
            found = state[name].spec
            raise EngineError(
                f"tensor {name!r} is {found.dtype} {list(found.shape)}, the served model's is {spec.dtype} {list(spec.shape)}",
                code="weights_layout",
            )
    names = set(specs) if changed is None else changed
    if unknown := sorted(names - specs.keys()):
        raise EngineError(f"changed tensor {unknown[0]!r} isn't in the version", code="weights_layout")
    return sorted(names)
