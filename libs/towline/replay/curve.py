"""A second trainer's curve beside the run's that it was fed: loss, mismatch and weights at each depth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from towline.bundle.source import Source
from towline.contract.entries import VersionEntry
from towline.delta.state import ModelState
from towline.errors import MissingError
from towline.replay.compare import distance
from towline.store.log import Log
from towline.store.materialize import materialize
from towline.store.objects import ObjectStore

FIGURES = ("reward_mean", "loss", "mismatch_kl", "rows", "skipped")
"""What a trainer's log says of each batch that it trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """After the batch for `depth` - 1. The figures are {} where no log of that trainer is at hand."""

    depth: int
    recorded_depth: int | None
    """The depth that the recorded batch made in its own run; None where it was put together anew."""
    figures: dict[str, Any]
    recorded: dict[str, Any]
    equal: bool | None
    """Whether the weights are the run's, bit for bit; None where one of the two has no version of this depth."""
    max_abs_diff: float | None
    """Largest |weight - the run's weight|; None where it isn't known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The new run's whole curve."""

    run: str
    of: str
    batches: int
    rows: int
    groups: int
    missing_rows: int
    changed: dict[str, tuple[Any, Any]]
    """Setting -> (the run's, the new run's)."""
    left_out: dict[str, int] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"run {self.run}: {self.batches} batches of run {self.of} trained, {self.groups} groups, {self.rows} samples"
        for name, (was, now) in self.changed.items():
            yield f"  {name} = {now!r} (was {was!r})"
        for reason, count in self.left_out.items():
            yield f"  left out: {count} group{'s' * (count != 1)} {reason}"
        if self.missing_rows:
            yield f"  missing: {self.missing_rows} samples whose bytes aren't in the stream any more"
        yield f"  {'depth':>6}  {'reward':>8}  {'loss':>10}  {'(was)':>10}  {'mismatch KL':>12}  {'(was)':>10}  weights"
        for point in self.points:
            yield (
                f"  {point.depth:>6}  {_shown(point.figures, 'reward_mean'):>8}  {_shown(point.figures, 'loss'):>10}  "
                f"{_shown(point.recorded, 'loss'):>10}  {_shown(point.figures, 'mismatch_kl'):>12}  "
                f"{_shown(point.recorded, 'mismatch_kl'):>10}  {_weights(point)}"
            )


def read_figures(log: Path | None) -> dict[int, dict[str, Any]]:
    """Depth -> what a trainer's log says of the batch that made it; the last word counts. {} where there is no log."""
    found: dict[int, dict[str, Any]] = {}
    if log is None or not log.is_file():
        return found
    with log.open(errors="replace") as lines:
        for line in lines:
            if '"trained"' not in line:
                continue
            try:
                said = json.loads(line)
            except ValueError:  # cut off by a kill
                continue
            if said.get("event") == "trained" and isinstance(said.get("depth"), int):
                found[said["depth"]] = {name: said[name] for name in FIGURES if name in said}
    return found


class Weights:
    """Both lines' weights, side by side, in the order of the depths."""

    def __init__(self, source: Source, objects: ObjectStore, log: Log) -> None:
        self._sides = ((source.objects, source.log), (objects, log))
        self._have: list[tuple[int, ModelState] | None] = [None, None]

    def compare(self, recorded_depth: int | None, depth: int) -> tuple[bool | None, float | None]:
        """(equal, largest difference) of the versions at these depths of the two lines."""
        numbers = [
            log.lineage.version_at_depth(wanted) if wanted is not None else None
            for (_, log), wanted in zip(self._sides, (recorded_depth, depth), strict=True)
        ]
        if None in numbers:
            return None, None
        entries = [log.entry(number) for (_, log), number in zip(self._sides, numbers, strict=True) if number is not None]
        digests = {entry.model_digest for entry in entries if isinstance(entry, VersionEntry)}
        if len(digests) == 1 and len(entries) == 2:
            return True, 0.0
        states = []
        for side, ((objects, log), number) in enumerate(zip(self._sides, numbers, strict=True)):
            assert number is not None
            try:
                state = materialize(objects, log, number, self._have[side])
            except MissingError:  # a bundle without the versions' parts
                return False, None
            self._have[side] = (number, state)
            states.append(state)
        return False, distance(*states).max_abs_diff


def _shown(figures: Mapping[str, Any], name: str) -> str:
    value = figures.get(name)
    return "-" if value is None else f"{value:.4g}"


def _weights(point: Point) -> str:
    if point.equal is None:
        return "-"
    if point.equal:
        return "equal"
    return "differ" if point.max_abs_diff is None else f"differ by {point.max_abs_diff:.3g}"
