"""Which of a run's trajectories: by group, version, reward, and so on; each with its score."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, get_args

from towline.bundle.source import Source
from towline.bundle.states import STATES, States, read_states
from towline.bus.client import Message
from towline.bus.topology import OUTCOME, TRAJECTORY
from towline.contract.groups import group_token
from towline.contract.outcome import Score, decode_outcome
from towline.contract.trajectory import FinishReason, Trajectory, decode_trajectory
from towline.errors import MalformedError, UsageError

FINISHES = get_args(FinishReason)
FEW = 64
"""So many scores are asked for one by one; for more, the stream is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Everything given must hold; bounds are inclusive."""

    group: int | None = None
    lane: str | None = None
    finish: str | None = None
    replica: str | None = None
    prompt: str | None = None
    """SOURCE, SOURCE:INDEX or SOURCE:INDEX:EPOCH of the prompt."""
    versions: tuple[int, int] | None = None
    """One of its policy tokens is of a version in this range."""
    reward: tuple[float, float] | None = None
    time: tuple[float, float] | None = None
    """Unix seconds of its arrival in the stream."""
    environment: str | None = None
    """As its task names it: an import path, or what the run's settings say."""
    state: str | None = None
    """One of `bundle.states.STATES`."""

    def __post_init__(self) -> None:
        if self.state is not None and self.state not in STATES:
            raise UsageError(f"--state {self.state!r}: use one of {', '.join(STATES)}", code="state")
        if self.finish is not None and self.finish not in FINISHES:
            raise UsageError(f"--finish {self.finish!r}: use one of {', '.join(FINISHES)}", code="finish")

    @property
    def needs_decisions(self) -> bool:
        """Whether CONTROL tells."""
        return self.environment is not None or self.state is not None

    @property
    def needs_contents(self) -> bool:
        """Whether the subject alone doesn't tell."""
        return self != Filter(group=self.group)

    def takes(self, trajectory: Trajectory, at: float) -> bool:
        """Of everything but the reward and what CONTROL tells."""
        t = trajectory
        wanted = ((self.group, t.group), (self.lane, t.lane), (self.finish, t.finish), (self.replica, t.replica))
        if any(want is not None and want != found for want, found in wanted):
            return False
        if self.prompt is not None:
            ref = t.prompt_ref
            names = (ref.source, f"{ref.source}:{ref.index}", f"{ref.source}:{ref.index}:{ref.epoch}")
            if self.prompt not in names:
                return False
        if self.time is not None and not self.time[0] <= at <= self.time[1]:
            return False
        if self.versions is None:
            return True
        return any(self.versions[0] <= span.version <= self.versions[1] for span in t.version_spans)

    def takes_reward(self, score: Score | None) -> bool:
        return self.reward is None or (score is not None and self.reward[0] <= score.reward <= self.reward[1])


@dataclass(frozen=True, slots=True)
class Selected:
    """A trajectory; None where the message can't be decoded, `problem` then says why."""

    message: Message
    trajectory: Trajectory | None
    score: Score | None
    problem: str | None = None
    state: str | None = None
    """Where it was asked for."""


async def select(source: Source, wanted: Filter) -> AsyncGenerator[Selected, None]:
    """In the stream's order. Messages that can't be decoded come too, where nothing but the group is asked for."""
    scores = await read_scores(source, wanted.group)
    states = await read_states(source) if wanted.needs_decisions else None
    async with contextlib.aclosing(_plain(source, wanted, 1)) as found:
        async for item in found:
            score = scores.get((item.trajectory.group, item.trajectory.sample)) if item.trajectory else None
            state = _decided(source, wanted, states, item, score)
            if wanted.takes_reward(score) and state is not False:
                yield Selected(item.message, item.trajectory, score, item.problem, state)


def _decided(
    source: Source, wanted: Filter, states: States | None, item: Selected, score: Score | None
) -> str | Literal[False] | None:
    """The sample's state, where it's asked for; False where the filter doesn't take it."""
    if states is None:
        return None
    t = item.trajectory
    if t is None:
        return False
    if wanted.environment is not None and states.environment(t.group) != wanted.environment:
        return False
    if wanted.state is None:
        return None
    state = states.state(source, t.group, t.sample, item.message.data, scored=score is not None)
    return state if state == wanted.state else False


async def newest(source: Source, wanted: Filter, count: int) -> list[Selected]:
    """The last `count`, the newest last; of a long stream no more is read than that needs."""
    if wanted.reward is not None or wanted.needs_decisions or count > FEW:
        async with contextlib.aclosing(select(source, wanted)) as chosen:
            return list(deque([item async for item in chosen], count))
    start = 1
    if not wanted.needs_contents and wanted.group is None:
        start = max((await source.state(TRAJECTORY)).last - count + 1, 1)
    async with contextlib.aclosing(_plain(source, wanted, start)) as found:
        last = deque([item async for item in found], count)
    return [
        Selected(
            item.message,
            item.trajectory,
            await score_of(source, item.trajectory.group, item.trajectory.sample) if item.trajectory else None,
            item.problem,
        )
        for item in last
    ]


async def score_of(source: Source, group: int, sample: int) -> Score | None:
    message = await source.last(OUTCOME, source.topology.score(group, sample))
    outcome = None if message is None else decode_outcome(message.data)
    return outcome if isinstance(outcome, Score) else None


async def read_scores(source: Source, group: int | None = None) -> dict[tuple[int, int], Score]:
    """(group, sample) -> its score."""
    subject = source.topology.subject(f"outcome.score.{'*' if group is None else group_token(group)}.*")
    found: dict[tuple[int, int], Score] = {}
    async with contextlib.aclosing(source.read(OUTCOME, subjects=[subject])) as messages:
        async for message in messages:
            outcome = decode_outcome(message.data)
            if isinstance(outcome, Score):
                found[outcome.group, outcome.sample] = outcome
    return found


async def _plain(source: Source, wanted: Filter, start: int) -> AsyncGenerator[Selected, None]:
    subjects = None if wanted.group is None else [source.topology.subject(f"trajectory.{group_token(wanted.group)}.*")]
    async with contextlib.aclosing(source.read(TRAJECTORY, start=start, subjects=subjects)) as messages:
        async for message in messages:
            try:
                trajectory = decode_trajectory(message.data)
            except MalformedError as error:
                if not wanted.needs_contents:
                    yield Selected(message, None, None, error.message)
                continue
            if wanted.takes(trajectory, message.at):
                yield Selected(message, trajectory, None)
