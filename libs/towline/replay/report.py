"""What a replay found, version by version, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

EnvironmentDifferences = dict[str, tuple[str, str]]
"""Name -> (as recorded, as here)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionResult:
    """One version, trained again."""

    version: int
    depth: int
    epoch: int
    batches: tuple[int, ...]
    """The steps: their for_depth."""
    equal: bool
    recorded_digest: str
    replayed_digest: str
    first_tensor: str | None = None
    """The first by name whose digest differs; None where all are equal, or the version's manifest is gone."""
    differing_tensors: int = 0
    tensors: int = 0
    max_abs_diff: float | None = None
    """Over all weights in the published dtype; None where they are equal, or the recorded ones can't be had."""
    notes: tuple[str, ...] = ()
    """What didn't go as recorded: rows, skipped steps."""


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """`results` in the order of training; it ends at the first difference unless the replay was told to go on."""

    run: str
    start: int
    end: int
    planned: int
    """Versions from `start` to `end`."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Settings that this replay was told to change."""
    results: list[VersionResult] = field(default_factory=list)
    environments: dict[int, EnvironmentDifferences] = field(default_factory=dict)
    """Epoch -> what differs between the recorded process and this one; {} where nothing does."""
    unrecorded: list[int] = field(default_factory=list)
    """Epochs that recorded no fingerprint."""
    stopped: str | None = None
    """Why it couldn't go on."""

    def add(self, result: VersionResult, opened: tuple[int, EnvironmentDifferences | None] | None = None) -> None:
        """opened: (epoch, how its environment differs, None where it recorded none) where the version began an epoch."""
        if opened is not None:
            epoch, differences = opened
            if differences is None:
                self.unrecorded.append(epoch)
            else:
                self.environments[epoch] = differences
        self.results.append(result)

    def goes_on(self, past_differences: bool) -> bool:
        """Whether there's a reason to train more: where the bits must be equal, none after the first difference."""
        return self.stopped is None and (past_differences or self.parted is None or not self.comparable)

    @property
    def comparable(self) -> bool:
        """Whether the bits must be equal: every epoch recorded its fingerprint, and it's this process's."""
        return not self.unrecorded and not any(self.environments.values())

    @property
    def equal(self) -> bool:
        """Whether every planned version was trained again and is the recorded one, bit for bit."""
        return len(self.results) == self.planned and self.stopped is None and all(result.equal for result in self.results)

    @property
    def parted(self) -> VersionResult | None:
        """The first version that differs."""
        return next((result for result in self.results if not result.equal), None)

    def plain(self) -> dict[str, Any]:
        parted = self.parted
        return {
            **asdict(self), "equal": self.equal, "comparable": self.comparable, "parted": asdict(parted) if parted else None,
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The verdict first."""
        yield self._verdict()
        for name, value in self.changed.items():
            yield f"  changed for this replay: {name} = {value!r}"
        if self.parted is not None:
            yield from _parting(self.parted)
        if not self.comparable:
            yield from self._incomparable()
        if self.stopped is not None:
            yield f"  stopped: {self.stopped}"

    def _verdict(self) -> str:
        span = f"versions {self.start} to {self.end}"
        if self.equal:
            count = len(self.results)
            return f"equal: {count} version{'s' * (count != 1)} of run {self.run} trained again bit for bit ({span})"
        if self.parted is None:
            done = sum(result.equal for result in self.results)
            return f"not finished: {done} of {self.planned} versions were trained again, all equal ({span})"
        if not self.comparable:
            return f"not comparable bit for bit: run {self.run} was trained in another environment ({span})"
        before = sum(1 for _ in self.results[: self.results.index(self.parted)])
        return f"parted at version {self.parted.version}: run {self.run}, {before} equal before it ({span})"

    def _incomparable(self) -> Iterator[str]:
        for epoch in self.unrecorded:
            yield f"  epoch {epoch} recorded no fingerprint: whether the bits must be equal isn't known"
        told: list[EnvironmentDifferences] = []
        for epoch, differences in self.environments.items():
            if differences and differences not in told:
                told.append(differences)
                listed = "; ".join(f"{name} was {was!r}, is {now!r}" for name, (was, now) in differences.items())
                yield f"  epoch {epoch}: {listed}"
        unequal = [result for result in self.results if not result.equal]
        if unequal:
            yield "  tolerance: the largest |weight - recorded weight|, version by version"
        for result in self.results if unequal else ():
            gap = "equal" if result.equal else "unknown" if result.max_abs_diff is None else f"{result.max_abs_diff:.3g}"
            yield f"    version {result.version:>5}  depth {result.depth:>5}  {gap}"


def _parting(result: VersionResult) -> Iterator[str]:
    steps = f"step {result.batches[0]}" if len(result.batches) == 1 else f"steps {result.batches[0]} to {result.batches[-1]}"
    yield f"  {steps} (depth {result.depth}, epoch {result.epoch})"
    if result.first_tensor is not None:
        yield f"  first tensor: {result.first_tensor} ({result.differing_tensors} of {result.tensors} differ)"
    if result.max_abs_diff is not None:
        yield f"  largest |weight - recorded weight|: {result.max_abs_diff:.3g}"
    yield f"  model digest: recorded {result.recorded_digest[:16]}…, replayed {result.replayed_digest[:16]}…"
    for note in result.notes:
        yield f"  {note}"
