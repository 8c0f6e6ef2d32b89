"""Pacing against discrete-event simulations: in-flight groups, staleness and throughput are what the limiter's band says.

The real state and decider run in simulated time between a fleet and a trainer. Beside them stands a model that knows nothing of
depths, records or staleness: a box of (1 + max_staleness) * groups_per_batch tickets, one for each group under way. And for
constant durations the throughput has a closed form, the asymptotic bounds of a closed queueing network (Denning and Buzen, 1978).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import simpy

from towline.buffer.limiter import Limiter, pacing
from towline.contract.control import BatchRecord, ReissueRecord, TaskRecord, decode_control
from unit.buffer.world import World, started

Process = Generator[simpy.Event, Any, None]
GROUP = 2


@dataclass(frozen=True)
class Site:
    slots: int
    generate: Callable[[int, int], float]
    """(group, sample) -> seconds."""
    train: float
    per_batch: int
    staleness: int
    steps: int = 24


@dataclass
class Seen:
    commits: list[float] = field(default_factory=list)
    most_waiting: int = 0
    staleness: list[int] = field(default_factory=list)


class Simulated:
    """The buffer between a fleet and a trainer. `go(False)` stops the trainer, `go(True)` lets it go on."""

    def __init__(self, site: Site) -> None:
        self.site, self.env, self.seen = site, simpy.Environment(), Seen()
        self.world: World = started(
            group_size=GROUP, groups_per_batch=site.per_batch, max_staleness=site.staleness, steps=site.steps,
            group_deadline_seconds=1e9,
        )  # fmt: skip
        self._tasks = simpy.Store(self.env)
        self._issued = 0
        self._batched = self.env.event()
        self._running = self.env.event()
        self.go(True)
        for _ in range(site.slots):
            self.env.process(self._slot())
        self.env.process(self._trainer())
        self._settle()

    def go(self, running: bool) -> None:
        if running and not self._running.triggered:
            self._running.succeed()
        elif not running:
            self._running = self.env.event()

    def _settle(self) -> None:
        self.world.now = 1000.0 + self.env.now
        self.world.settle()
        for data in self.world.control[self._issued :]:
            record = decode_control(data)
            if isinstance(record, TaskRecord | ReissueRecord):
                self._tasks.put(record.task)
            elif isinstance(record, BatchRecord):
                self.seen.staleness += [record.for_depth - row.least_depth for row in record.rows]
                self._batched.succeed()
                self._batched = self.env.event()
        self._issued = len(self.world.control)
        waiting = self.world.state.waiting_groups(self.world.view.depth)
        self.seen.most_waiting = max(self.seen.most_waiting, waiting)

    def _slot(self) -> Process:
        while True:
            task = yield self._tasks.get()
            line = self.world.lineage
            assert line.depth(line.latest) >= task.not_before_depth, "a task is never issued before it can be served"
            version = line.latest
            yield self.env.timeout(self.site.generate(task.group, task.sample))
            if task.group in self.world.state.groups:
                self.world.outcome(self.world.score(task.group, task.sample, version))
            self._settle()

    def _trainer(self) -> Process:
        for depth in range(self.site.steps):
            while depth not in self.world.state.batches:
                yield self._batched
            yield self._running
            yield self.env.timeout(self.site.train)
            self.world.version()
            self.seen.commits.append(self.env.now)
            self._settle()


def ticketed(site: Site) -> list[float]:
    """Commit times of the ticket model."""
    env, commits = simpy.Environment(), list[float]()
    tickets = simpy.Container(env, init=(1 + site.staleness) * site.per_batch)
    samples, whole = simpy.Store(env), simpy.Container(env)
    missing: dict[int, int] = {}

    def admit() -> Process:
        for group in range(site.steps * site.per_batch):
            yield tickets.get(1)
            missing[group] = GROUP
            for sample in range(GROUP):
                samples.put((group, sample))

    def slot() -> Process:
        while True:
            group, sample = yield samples.get()
            yield env.timeout(site.generate(group, sample))
            missing[group] -= 1
            if not missing[group]:
                whole.put(1)

    def train() -> Process:
        for _ in range(site.steps):
            yield whole.get(site.per_batch)
            yield env.timeout(site.train)
            commits.append(env.now)
            tickets.put(site.per_batch)

    for process in (admit(), train(), *(slot() for _ in range(site.slots))):
        env.process(process)
    env.run()
    return commits


def constant(seconds: float) -> Callable[[int, int], float]:
    return lambda group, sample: seconds


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize(
    ("slots", "generate", "train"),
    [(64, 10.0, 1.0), (64, 1.0, 10.0), (64, 4.0, 4.0), (6, 4.0, 4.0), (3, 2.0, 1.0)],
    ids=["slow samples", "slow trainer", "even", "few slots", "very few slots"],
)
def test_constant_durations_give_the_ticket_models_very_commits_and_the_closed_forms_throughput(
    staleness: int, slots: int, generate: float, train: float
) -> None:
    site = Site(slots, constant(generate), train, per_batch=3, staleness=staleness)
    simulated = Simulated(site)
    simulated.env.run()
    seen, most = simulated.seen, (1 + staleness) * site.per_batch
    assert seen.commits == pytest.approx(ticketed(site))
    assert seen.most_waiting == most, "never more than the band is wide, and all of it is used"
    assert max(seen.staleness) <= staleness
    assert simulated.world.state.dropped == {}
    assert len(seen.commits) == site.steps
    in_a_batch = site.per_batch * GROUP
    wave = -(-in_a_batch // slots) * generate  # one batch's samples, with nothing else to do
    bound = min(1 / train, slots / (generate * in_a_batch), (1 + staleness) / (wave + train))
    last = 2 * site.steps // 3
    rate = (last - 4) / (seen.commits[last] - seen.commits[4])
    assert rate == pytest.approx(bound, rel=0.1)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_whatever_the_durations_band_and_bound_hold_and_nothing_is_lost(staleness: int, seed: int) -> None:
    """Lognormal lengths: some samples take ten times the others' time, and the surplus that gets too stale is a named drop."""
    lengths = random.Random(seed)
    drawn: dict[tuple[int, int], float] = {}
    site = Site(8, lambda *key: drawn.setdefault(key, lengths.lognormvariate(0, 1.2)), 0.5, per_batch=2, staleness=staleness)
    simulated = Simulated(site)
    simulated.env.run(until=10_000)
    state, seen = simulated.world.state, simulated.seen
    assert len(seen.commits) == site.steps
    assert seen.most_waiting <= (1 + staleness) * site.per_batch
    assert max(seen.staleness) <= staleness
    assert set(state.dropped) <= {"stale", "end_of_run"}
    trained = state.totals.samples
    assert state.admitted == trained + sum(state.dropped.values())
    assert trained == site.steps * site.per_batch * GROUP


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_stopped_trainer_stops_admission_and_nothing_is_discarded(staleness: int) -> None:
    site = Site(16, constant(1.0), 2.0, per_batch=2, staleness=staleness)
    simulated = Simulated(site)
    simulated.env.run(until=20.5)
    simulated.go(False)
    simulated.env.run(until=30)
    state, view = simulated.world.state, simulated.world.view
    admitted, depth, records = state.admitted, view.depth, len(simulated.world.control)
    simulated.env.run(until=100_000)
    assert (state.admitted, simulated.world.view.depth, len(simulated.world.control)) == (admitted, depth, records)
    assert state.waiting_groups(depth) == (1 + staleness) * site.per_batch, "the band is full, and that is all"
    assert state.dropped == {}
    simulated.go(True)
    simulated.env.run()
    assert len(simulated.seen.commits) == site.steps
    assert state.dropped == {}


def test_the_limiter_is_a_band_around_inserts_times_samples_per_insert_minus_samples() -> None:
    limiter = Limiter(samples_per_insert=4, min_diff=-2, max_diff=10)
    inserts = samples = 0
    moves = random.Random(7)
    reached = set()
    for _ in range(2000):
        diff = inserts * 4 - samples
        reached.add(diff)
        assert (limiter.insertable(diff) >= 1) == (diff + 4 <= 10)
        assert (limiter.sampleable(diff) >= 1) == (diff - 1 >= -2)
        if moves.random() < 0.5 and limiter.insertable(diff):
            inserts += moves.randint(1, limiter.insertable(diff))
        elif limiter.sampleable(diff):
            samples += moves.randint(1, limiter.sampleable(diff))
    assert min(reached) == -2
    assert max(reached) == 10
    assert abs(samples - 4 * inserts) <= 10


def test_the_buffers_band_is_what_the_next_batches_take() -> None:
    assert pacing(groups_per_batch=4, max_staleness=2, batches_left=9).insertable(0) == 12
    assert pacing(groups_per_batch=4, max_staleness=2, batches_left=2).insertable(3) == 5
    assert pacing(groups_per_batch=4, max_staleness=0, batches_left=0).insertable(0) == 0
    with pytest.raises(ValueError, match="samples_per_insert"):
        Limiter(samples_per_insert=0, min_diff=0, max_diff=1)
    with pytest.raises(ValueError, match="max_diff"):
        Limiter(samples_per_insert=1, min_diff=2, max_diff=1)
