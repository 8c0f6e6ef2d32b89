"""A run's trajectories scored by another verifier, and how its rewards differ from the recorded ones. Nothing is written back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from towline.bundle.select import Filter, Selected, select
from towline.bundle.source import Source
from towline.contract.groups import group_token
from towline.errors import UsageError, VerifierError
from towline.verifiers.base import Reward, check_reward, check_rewards, load_verifier, sample_of
from towline.verifiers.runner import Runner
from towline.verifiers.tokenizer import Tokenizer, stored_tokenizer

SHOWN = 20
"""Differences that are listed for people, the largest first."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """One sample. `recorded` is None where it was never scored, `reward` where the verifier failed."""

    group: int
    sample: int
    recorded: float | None
    reward: float | None
    components: dict[str, float] = field(default_factory=dict)
    problem: str | None = None

    @property
    def name(self) -> str:
        return f"{group_token(self.group)}.{self.sample}"

    @property
    def difference(self) -> float:
        return 0.0 if self.recorded is None or self.reward is None else self.reward - self.recorded


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """Every sample, in the stream's order."""

    verifier: str
    samples: list[Rescored]

    @property
    def both(self) -> list[tuple[float, float]]:
        """(recorded, new) where there are both."""
        return [(s.recorded, s.reward) for s in self.samples if s.recorded is not None and s.reward is not None]

    def summary(self) -> dict[str, Any]:
        both = np.array(self.both, np.float64).reshape(-1, 2)
        varied = len(both) > 1 and bool(np.all(np.ptp(both, axis=0) > 0))
        return {
            "verifier": self.verifier,
            "samples": len(self.samples),
            "compared": len(both),
            "changed": int((both[:, 0] != both[:, 1]).sum()),
            "higher": int((both[:, 1] > both[:, 0]).sum()),
            "lower": int((both[:, 1] < both[:, 0]).sum()),
            "failed": sum(sample.problem is not None for sample in self.samples),
            "mean_recorded": float(both[:, 0].mean()) if len(both) else None,
            "mean": float(both[:, 1].mean()) if len(both) else None,
            "max_abs_diff": float(np.abs(both[:, 1] - both[:, 0]).max()) if len(both) else None,
            "correlation": float(np.asarray(np.corrcoef(both.T))[0, 1]) if varied else None,
        }

    def plain(self) -> dict[str, Any]:
        return {"summary": self.summary(), "samples": [asdict(sample) for sample in self.samples]}

    def lines(self) -> Iterator[str]:
        found = self.summary()
        yield (
            f"{found['verifier']}: {found['changed']} of {found['compared']} rewards differ "
            f"({found['higher']} higher, {found['lower']} lower), {found['failed']} failed"
        )
        if found["compared"]:
            correlation = "-" if found["correlation"] is None else f"{found['correlation']:.3f}"
            yield f"  mean {found['mean_recorded']:.4f} -> {found['mean']:.4f}, correlation {correlation}"
        changed = sorted((s for s in self.samples if s.difference), key=lambda s: -abs(s.difference))
        for sample in changed[:SHOWN]:
            name = sample.name
            yield f"  {name:>12}  {sample.recorded:.4f} -> {sample.reward:.4f}  {sample.difference:+.4f}"
        if len(changed) > SHOWN:
            yield f"  … and {len(changed) - SHOWN} more; --json lists all"
        for sample in [s for s in self.samples if s.problem is not None][:SHOWN]:
            yield f"  {sample.name:>12}  {sample.problem}"


async def rescore(
    source: Source,
    verifier: str,
    arguments: dict[str, Any],
    *,
    scope: str | None = None,
    wanted: Filter | None = None,
    limit: int | None = None,
) -> RescoreReport:
    """`verifier` is an import path. scope: sample or group (only whole groups can be scored); None: the run's."""
    scope = scope or source.settings.reward.scope
    if scope not in ("sample", "group"):
        raise UsageError(f"--scope {scope!r}: use sample or group", code="scope")
    loaded = load_verifier(verifier, arguments, setting="--rescore")
    settings = source.settings.reward
    runner = Runner(loaded, timeout_seconds=settings.timeout_seconds, concurrency=settings.concurrency)
    tokenizer = stored_tokenizer(source.objects, source.settings.run.name)
    items: list[Selected] = []
    async with contextlib.aclosing(select(source, wanted or Filter())) as chosen:
        async for item in chosen:
            if limit is not None and len(items) >= limit:
                break
            if item.trajectory is not None:
                items.append(item)
    units = [[item] for item in items] if scope == "sample" else _groups(items)
    try:
        answers = await asyncio.gather(*(_score(runner, unit, tokenizer, scope) for unit in units))
    finally:
        runner.close()
    order = {(item.trajectory.group, item.trajectory.sample): place for place, item in enumerate(items) if item.trajectory}
    found = [result for answer in answers for result in answer]
    return RescoreReport(verifier, sorted(found, key=lambda result: order[result.group, result.sample]))


def _groups(items: Sequence[Selected]) -> list[list[Selected]]:
    """Each group's samples in order."""
    groups: dict[int, dict[int, Selected]] = {}
    for item in items:
        assert item.trajectory is not None
        groups.setdefault(item.trajectory.group, {})[item.trajectory.sample] = item
    return [[members[sample] for sample in sorted(members)] for members in groups.values()]


async def _score(runner: Runner, unit: list[Selected], tokenizer: Tokenizer, scope: str) -> list[Rescored]:
    trajectories = [item.trajectory for item in unit if item.trajectory is not None]
    samples = [sample_of(trajectory, tokenizer) for trajectory in trajectories]
    name = runner.verifier.name
    rewards: list[Reward | None] = [None] * len(unit)
    problem = None
    try:
        if scope == "group" and len(samples) != trajectories[0].group_size:
            raise VerifierError(f"only {len(samples)} of the group's {trajectories[0].group_size} samples are there")
        answer = await runner.run(samples if scope == "group" else samples[0])
        found = check_rewards(answer, len(samples), name) if scope == "group" else [check_reward(answer, name)]
        rewards = list(found)
    except VerifierError as error:
        problem = error.message
    return [
        Rescored(
            trajectory.group,
            trajectory.sample,
            item.score.reward if item.score else None,
            reward.value if reward else None,
            reward.components if reward else {},
            problem,
        )
        for item, trajectory, reward in zip(unit, trajectories, rewards, strict=True)
    ]
