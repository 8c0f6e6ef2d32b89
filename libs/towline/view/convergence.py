"""Which replica came to serve which version, and when: gathered from acks, which each tell only the last few."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from towline.contract.policy import Ack

MOST_VERSIONS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A replica served a version at `at` (Unix seconds). The rest is None where only a later ack told of it."""

    replica: str
    at: float
    mode: str | None = None
    prepare_seconds: float | None = None
    pause_seconds: float | None = None
    wire_bytes: int | None = None
    probe_max_abs_diff: float | None = None
    engine: str | None = None
    """equal, differs, or None where the engine can't tell its weights' digest."""


class Convergence:
    """The newest versions that any ack has told of."""

    def __init__(self) -> None:
        self._reached: OrderedDict[int, dict[str, Reached]] = OrderedDict()

    def take(self, acks: Iterable[Ack]) -> None:
        for ack in acks:
            for served in ack.history:
                self._of(served.version).setdefault(ack.replica, Reached(replica=ack.replica, at=served.at))
            self._of(ack.version)[ack.replica] = Reached(
                replica=ack.replica, at=ack.at, mode=ack.mode, prepare_seconds=ack.prepare_seconds,
                pause_seconds=ack.pause_seconds, wire_bytes=ack.wire_bytes, probe_max_abs_diff=ack.probe_max_abs_diff,
                engine=None if ack.engine_digest is None else "equal" if ack.engine_digest == ack.files_digest else "differs",
            )  # fmt: skip
        while len(self._reached) > MOST_VERSIONS:
            del self._reached[min(self._reached)]

    def of(self, version: int) -> list[Reached]:
        """By the time of the ack."""
        return sorted(self._reached.get(version, {}).values(), key=lambda one: one.at)

    def _of(self, version: int) -> dict[str, Reached]:
        return self._reached.setdefault(version, {})
