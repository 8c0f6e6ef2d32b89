"""A run as discrete events: workers, buffer, reward, trainer, publisher and the spread of versions, each with rule and time.

The rules are the run's: the band of (1 + max_staleness) batches, groups whole or not at all, the order of the policy, what is
over the bound dropped and its place given away, useless samples given up and issued again, one version in flight while steps go
on (in sync mode each is waited for), in-flight samples that go on under a new version while their oldest tokens count. The times
are the scenario's `[simulate]` table, its trainer's and its engines'. With constant times the outcome has a closed form.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from towline.loadtest.scenario import Link, Scenario
from towline.simulate.lengths import Drawn, Lengths, lengths_of

Process = Generator[simpy.Event, Any, None]
UNKNOWN = 1 << 60
CANCELLED, STALE, DIED = "cancelled", "stale", "died"


@dataclass(slots=True, eq=False)
class Group:
    number: int
    left: int
    least_depth: int = UNKNOWN
    """Among its scored samples."""
    depths: list[int] = field(default_factory=list)
    """Of each scored sample's oldest tokens."""
    tokens: int = 0
    dropped: bool = False
    running: dict[simpy.Process, Sample] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Sample:
    group: Group
    drawn: Drawn
    not_before_depth: int


@dataclass(slots=True, eq=False)
class Host:
    """A worker with its slots, and the link that its versions come over. Several workers of one machine aren't told apart."""

    number: int
    link: Link
    changed: simpy.Event
    depth: int = 0
    life: int = 0
    """Counted at each death: slots of an earlier life aren't given out."""
    up: bool = True
    preparing: bool = False
    running: dict[simpy.Process, tuple[Sample, int]] = field(default_factory=dict)
    """With the depth that it began on."""


@dataclass(slots=True)
class Seen:
    """What happened. Times are seconds since the start."""

    commits: list[tuple[float, int]] = field(default_factory=list)
    """(time, depth)"""
    batches: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, rows, policy tokens)"""
    staleness: list[int] = field(default_factory=list)
    """Of each row, by its own oldest tokens."""
    age_seconds: list[float] = field(default_factory=list)
    """Of each row: since its oldest version's entry."""
    samples: list[tuple[float, int]] = field(default_factory=list)
    """(scored at, tokens)"""
    trained_lengths: list[int] = field(default_factory=list)
    admitted: list[float] = field(default_factory=list)
    dropped_stale: int = 0
    steps: list[tuple[float, float]] = field(default_factory=list)
    """(began, ended) of each step and of each snapshot."""
    served: dict[int, list[float]] = field(default_factory=dict)
    """Depth -> seconds from its version's entry to each worker's serving it, in order."""
    made_again: int = 0
    """Samples that failed, became useless or died with their worker."""
    most_open: int = 0

    @property
    def spread(self) -> list[float]:
        """Seconds from a version's entry to each worker's serving it."""
        return [seconds for values in self.served.values() for seconds in values]

    @property
    def spread_all(self) -> list[float]:
        """Until the last worker served it: of the versions that as many served as ever served one."""
        full = max(map(len, self.served.values()), default=0)
        return [values[-1] for values in self.served.values() if len(values) == full]


class Pipeline:
    """`run()` to the run's last step, or to `until` seconds. `seed` is that of the run, in place of `run.seed`."""

    def __init__(self, scenario: Scenario, *, seed: int = 0, lengths: Lengths | None = None) -> None:
        settings, self.load, self.model = scenario.settings, scenario.load, scenario.simulate
        self.env, self.seen = simpy.Environment(), Seen()
        self._seed, self._chance = seed, random.Random(f"simulate/{seed}")
        self._lengths = lengths or lengths_of(scenario)
        buffer = settings.buffer
        self._group_size, self._per_batch, self._bound = buffer.group_size, buffer.groups_per_batch, buffer.max_staleness
        self._insert = math.ceil(self._per_batch * buffer.oversample)
        self._most_open, self._steps, self._policy = buffer.max_open_groups, settings.run.steps, buffer.policy
        mode = settings.trainer.mode
        self._sync = mode == "sync" or (mode == "auto" and not self._bound)
        self._slots, self._ack_wait = settings.rollout.slots, settings.rollout.ack_wait_seconds
        self.depth, self._committed_at = 0, [0.0]
        self._trained = self._formed = self._number = 0
        self._open: dict[int, Group] = {}
        """Admitted, not dropped, not in a batch."""
        self._batched = 0
        """Groups in batches that no committed version has consumed."""
        self._complete: dict[int, Group] = {}
        self._by_depth: dict[int, dict[int, Group]] = {}
        """Open groups with a scored sample, by the least depth among them."""
        self._tasks: deque[Sample] = deque()
        self._idle: deque[tuple[Host, int]] = deque()
        self._batches: deque[tuple[float, list[Group]]] = deque()
        self._batch_formed = self.env.event()
        self._reward_free_at = self._store_free_at = 0.0
        self._hosts = self._made_hosts()

    def run(self, until: float | None = None) -> Seen:
        for _ in range(self._slots):
            self._idle.extend((host, 0) for host in self._hosts)
        if self.model.worker_mtbf_seconds:
            for host in self._hosts:
                self.env.process(self._failing(host))
        done = self.env.process(self._train())
        self._admit()
        self.env.run(until=done if until is None else self.env.any_of([done, self.env.timeout(until)]))
        return self.seen

    def _made_hosts(self) -> list[Host]:
        """Links by their shares, in order."""
        links, workers = self.model.links, self.load.workers
        total, edge, hosts = sum(link.share for link in links), 0.0, list[Host]()
        for link in links:
            edge += link.share / total
            while len(hosts) < round(edge * workers):
                hosts.append(Host(len(hosts), link, self.env.event()))
        return hosts

    # The buffer

    def _admit(self) -> None:
        """As many groups as the band has room for; their samples go to free slots."""
        band = min(1 + self._bound, self._steps - self.depth) * self._insert
        while (waiting := len(self._open) + self._batched) < band and len(self._open) < self._most_open:
            not_before = max(0, self.depth + waiting // self._insert - self._bound)
            group = self._open[self._number] = Group(self._number, self._group_size)
            self._number += 1
            for drawn in self._lengths.group(group.number, self._group_size, self._seed):
                self.seen.admitted.append(self.env.now)
                self._tasks.append(Sample(group, drawn, not_before))
        self.seen.most_open = max(self.seen.most_open, len(self._open) + self._batched)
        self._assign()

    def _assign(self) -> None:
        while self._tasks and self._idle:
            if self._tasks[0].group.dropped:
                self._tasks.popleft()
                continue
            host, life = self._idle.popleft()
            if host.life == life:
                sample = self._tasks.popleft()
                process = self.env.process(self._generate(host, sample))
                sample.group.running[process] = sample
                host.running[process] = (sample, UNKNOWN)

    def _tidy(self) -> None:
        """Drop whatever holds a sample that is over the bound for the next batch."""
        for depth in [depth for depth in self._by_depth if self._formed - depth > self._bound]:
            for group in list(self._by_depth.pop(depth).values()):
                self._drop(group)

    def _drop(self, group: Group) -> None:
        group.dropped = True
        del self._open[group.number]
        self._complete.pop(group.number, None)
        self.seen.dropped_stale += self._group_size
        for process in list(group.running):
            process.interrupt(CANCELLED)

    def _form(self) -> None:
        """Every batch that there are groups for, in the order of the policy; then admit what there is room for."""
        self._tidy()
        while self._formed < self._steps and len(self._complete) >= self._per_batch:
            taken = heapq.nsmallest(self._per_batch, self._complete.values(), key=self._order)
            now = self.env.now
            for group in taken:
                del self._complete[group.number], self._open[group.number]
                del self._by_depth[group.least_depth][group.number]
                self.seen.staleness += [self._formed - depth for depth in group.depths]
                self.seen.age_seconds += [now - self._committed_at[depth] for depth in group.depths]
                self.seen.trained_lengths.append(group.tokens)
            self._batched += len(taken)
            self._formed += 1
            self.seen.batches.append((now, self._per_batch * self._group_size, sum(group.tokens for group in taken)))
            self._batches.append((now, taken))
            formed, self._batch_formed = self._batch_formed, self.env.event()
            formed.succeed()
            self._tidy()
        self._admit()

    def _order(self, group: Group) -> tuple[int, int]:
        if self._policy == "freshest_first":
            return -group.least_depth, group.number
        return (0 if self._policy == "fifo" else group.least_depth), group.number

    # Workers and reward

    def _generate(self, host: Host, sample: Sample) -> Process:
        env, life, group = self.env, host.life, sample.group
        process = env.active_process
        assert process is not None
        why, least = "", UNKNOWN
        try:
            yield env.timeout(self.model.task_seconds + host.link.round_trip_seconds)
            while host.depth < sample.not_before_depth:  # it holds the task, and its slot
                yield host.changed
            least = host.depth
            host.running[process] = (sample, least)
            seconds = self._lengths.seconds(sample.drawn, self._slots)
            fails = self._chance.random() < self._lengths.failure_rate
            yield env.timeout(seconds * (self._chance.random() if fails else 1.0))
            why = "failed" if fails else ""
        except simpy.Interrupt as interrupt:
            why = str(interrupt.cause)
        host.running.pop(process, None)
        group.running.pop(process, None)
        if host.life == life:
            self._idle.append((host, life))
        if not why:
            env.process(self._score(sample, least, host.link))
        elif why != CANCELLED:
            env.process(self._again(sample, self._ack_wait if why == DIED else self.model.score_seconds))
        self._assign()

    def _again(self, sample: Sample, seconds: float) -> Process:
        """The sample alone, with its seed: it's as long as before."""
        self.seen.made_again += 1
        yield self.env.timeout(seconds)
        sample.not_before_depth = max(sample.not_before_depth, self.depth - self._bound)
        self._tasks.append(sample)
        self._assign()

    def _score(self, sample: Sample, least: int, link: Link) -> Process:
        env, model, group = self.env, self.model, sample.group
        yield env.timeout(model.score_seconds + link.round_trip_seconds)
        if model.scores_per_second:
            self._reward_free_at = max(self._reward_free_at, env.now) + 1 / model.scores_per_second
            yield env.timeout(self._reward_free_at - env.now)
        self.seen.samples.append((env.now, sample.drawn.tokens))
        if group.dropped:
            return
        group.left -= 1
        group.tokens += sample.drawn.tokens
        group.depths.append(least)
        if least < group.least_depth:
            self._by_depth.get(group.least_depth, {}).pop(group.number, None)
            group.least_depth = least
            self._by_depth.setdefault(least, {})[group.number] = group
        if not group.left:
            self._complete[group.number] = group
        if not group.left or self._formed - least > self._bound:
            self._form()

    # The trainer and the publisher

    def _train(self) -> Process:
        """Steps as their rows are there. A version is taken from between two steps, as soon as the last one stands."""
        env, model = self.env, self.model
        staging: simpy.Process | None = None
        staged = 0
        down_at = self._next_failure()
        while True:
            in_flight = staging is not None and staging.is_alive
            if not in_flight and staged < self._trained:
                began, staged = env.now, self._trained
                yield env.timeout(model.snapshot_seconds)
                self.seen.steps.append((began, env.now))
                staging = env.process(self._publish(staged))
                continue
            if self._trained == self._steps and not in_flight:
                return
            waits: list[simpy.Event] = [staging] if staging is not None and in_flight else []
            if self._trained < self._steps and not (self._sync and in_flight):
                # Rows are fetched one batch ahead of the step.
                if not self._batches:
                    waits.append(self._batch_formed)
                elif (seconds := self._batches[0][0] + model.batch_seconds - env.now) > 0:
                    waits.append(env.timeout(seconds))
                else:
                    if env.now >= down_at:
                        yield env.timeout(model.trainer_start_seconds)
                        down_at = self._next_failure()
                    yield from self._step(self._batches.popleft()[1])
                    continue
            yield env.any_of(waits)

    def _step(self, batch: list[Group]) -> Process:
        load, sigma = self.load.trainer, self.load.trainer.step_sigma
        began = self.env.now
        factor = math.exp(self._chance.gauss(-(sigma**2) / 2, sigma)) if sigma else 1.0
        yield self.env.timeout(load.step_seconds * factor + load.seconds_per_token * sum(group.tokens for group in batch))
        self._trained += 1
        self.seen.steps.append((began, self.env.now))

    def _next_failure(self) -> float:
        mtbf = self.model.trainer_mtbf_seconds
        return self.env.now + self._chance.expovariate(1 / mtbf) if mtbf else math.inf

    def _publish(self, depth: int) -> Process:
        """Encode, upload, verify, commit what was trained up to this depth, and let buffer and fleet know."""
        yield self.env.timeout(self.model.publish_seconds)
        self._batched -= (depth - self.depth) * self._per_batch
        self._committed_at += [self.env.now] * (depth - self.depth)
        self.depth = depth
        self.seen.commits.append((self.env.now, depth))
        for host in self._hosts:
            self.env.process(self._hear(host))
        self._form()

    def _hear(self, host: Host) -> Process:
        """The hint of a new version: samples that are useless now are given up, and a host that prepares none begins to."""
        yield self.env.timeout(host.link.round_trip_seconds)
        for process, (_, least) in list(host.running.items()):
            if least != UNKNOWN and self.depth - least > self._bound:
                process.interrupt(STALE)
        if not host.preparing:
            host.preparing = True
            yield from self._follow(host)
            host.preparing = False

    def _follow(self, host: Host) -> Process:
        """One version after the other, always the newest: what is superseded meanwhile is never served here. Of each the entry,
        the manifest and the parts: turns over the link, and bytes through link and store."""
        env, model, link = self.env, self.model, host.link
        while host.up and host.depth < self.depth:
            depth, life = self.depth, host.life
            seconds = model.wire_bytes / link.bytes_per_second if link.bytes_per_second else 0.0
            if model.store_bytes_per_second:
                self._store_free_at = max(self._store_free_at, env.now) + model.wire_bytes / model.store_bytes_per_second
                seconds = max(seconds, self._store_free_at - env.now)
            yield env.timeout(2 * link.round_trip_seconds + seconds + model.prepare_seconds + model.pause_seconds)
            if host.life == life and depth > host.depth:
                host.depth = depth
                self.seen.served.setdefault(depth, []).append(env.now - self._committed_at[depth])
                changed, host.changed = host.changed, env.event()
                changed.succeed()

    def _failing(self, host: Host) -> Process:
        """Spot machines. What one had in hand is delivered to others when the ack wait has passed."""
        while True:
            yield self.env.timeout(self._chance.expovariate(1 / self.model.worker_mtbf_seconds))
            host.up, host.life = False, host.life + 1
            for process in list(host.running):
                process.interrupt(DIED)
            yield self.env.timeout(self.model.start_seconds)
            host.up, host.depth = True, self.depth
            self._idle.extend([(host, host.life)] * self._slots)
            self._assign()
