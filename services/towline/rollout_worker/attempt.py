"""One delivery of one task, from the pull to the ack. Truth first, ack second: what isn't published yet is never acked.

A trajectory is create-only, so a second delivery of a task, here or elsewhere, can't count twice; an attempt that fails
leaves a failure record, from which the buffer decides what comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import structlog

from towline import faults, spans
from towline.bus.client import Delivery
from towline.bus.topology import TRAJECTORY
from towline.contract.codec import encode
from towline.contract.outcome import Failure, FailureStage
from towline.contract.task import TRAIN, Task
from towline.contract.trajectory import Timings, Trajectory, decode_trajectory, encode_trajectory
from towline.errors import EngineError, MalformedError, TowlineError, UnavailableError, UsageError
from towline.rollout_worker.bench import Bench
from towline.rollout_worker.dead import dead_letter
from towline.rollout_worker.eligibility import eligibility, stale
from towline.rollout_worker.episode import EnvironmentFailed, Episode, Unusable
from towline.rollout_worker.partials import Origin, Partials
from towline.spans import Span

T = TypeVar("T")
Interruption = Literal["cancelled", "stale", "moved", "drained", "ended"]
_FIRST_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.2, 5.0
_LOG_SECONDS = 5.0
"""How long the LOG may take to show a version that a PARTIAL names."""
SUSPECT_STARTS = 2
"""A task that was begun so often without an outcome is begun alone among its like: so they don't take each other down, and the
one that kills its worker is the one whose starts are counted."""
_SAMPLE_S_OWN = ("generate", "environment", "malformed", "poisoned")
"""Stages that say something about the sample; the last attempt's end in DEAD."""
_log = structlog.get_logger("towline.rollout_worker")


@dataclass(slots=True)
class _Failed(Exception):
    stage: FailureStage
    reason: str
    final: bool = False


class Attempt:
    """`run` it in a task of its own; `interrupt` ends it early, unless it has begun to publish."""

    def __init__(self, bench: Bench, delivery: Delivery, task: Task) -> None:
        self.task, self.delivery = task, delivery
        self._bench = bench
        self._pulled_at = time.time()
        self._episode: Episode | None = None
        self._partials = Partials(
            Origin(bus=bench.bus, replica=bench.replica, engine=bench.engine.name, figures=bench.figures.partials), delivery, task
        )
        self._began_on: int | None = None
        self._publishing = False
        self._why: Interruption | None = None
        self._runner: asyncio.Task[None] | None = None

    @property
    def sequence(self) -> int:
        """The task's place in CONTROL."""
        return self.delivery.sequence

    @property
    def begun(self) -> bool:
        """Whether anything may have been generated."""
        return self._episode is not None

    async def run(self) -> None:
        with spans.follow("task", self.delivery.headers) as span:
            if span:
                task = self.task
                span.set(
                    group=task.group, sample=task.sample, lane=task.lane, attempt=task.attempt, task_sequence=self.sequence,
                    delivery=self.delivery.num_delivered, replica=self._bench.replica.name,
                    waited_seconds=max(self._pulled_at - task.admitted_at, 0.0),
                )  # fmt: skip
            await self._run(span)

    async def _run(self, span: Span) -> None:
        self._runner = asyncio.current_task()
        assert self._runner is not None
        try:
            try:
                if self._why is not None:  # before it began
                    await self._leave(self._why)
                else:
                    await self._deliver()
            except asyncio.CancelledError:
                if self._why is None:
                    raise
                self._runner.uncancel()
                if span:
                    span.set(left=self._why)
                await self._leave(self._why)
        except _Failed as failed:
            if span:
                span.fail(f"{failed.stage}: {failed.reason}")
            await self._fail(failed)
        finally:
            await self._partials.stop()
            if self._episode is not None:
                await self._episode.close()

    def interrupt(self, why: Interruption) -> None:
        """End it: see `_leave` for what each reason leaves behind."""
        if self._why is None and not self._publishing:
            self._why = why
            if self._runner is not None:
                self._runner.cancel()

    def review(self) -> None:
        """The LOG or the version changed: give up what can't count any more."""
        bench, exact = self._bench, self.task.exact_version
        if self._began_on is None:
            return
        if exact is not None:
            if bench.replica.version != exact:
                self.interrupt("moved")
        elif self._is_stale():
            self.interrupt("stale")

    async def _deliver(self) -> None:
        bench, task, delivery = self._bench, self.task, self.delivery
        faults.point("worker.task_taken")
        subject = bench.bus.topology.trajectory(task.group, task.sample)
        if bench.feed.cancelled(delivery.sequence):
            await self._leave("cancelled")
            return
        if delivery.num_delivered > 1 and await self._insist(lambda: bench.bus.last(TRAJECTORY, subject)) is not None:
            await delivery.ack()
            return
        if delivery.num_delivered > 1 or task.attempt:
            await self._insist(self._partials.look)
        if self._partials.starts >= bench.settings.rollout.max_starts:
            raise _Failed(
                "poisoned",
                f"begun {self._partials.starts} times without an outcome: it ends the worker that runs it",
                final=True,
            )
        async with bench.suspects if self._partials.starts >= SUSPECT_STARTS else contextlib.nullcontext():
            await self._until_served()
            begun_at = time.monotonic()
            with spans.child("rollout") as span:
                data, trajectory = await self._generate()
                if span:
                    span.set(
                        engine=bench.engine.name, finish=trajectory.finish, tokens=trajectory.policy_tokens,
                        resumed=self._partials.found is not None,
                        versions=sorted({at.version for at in trajectory.version_spans}),
                    )  # fmt: skip
            if self._partials.found is None:
                bench.pace.finished(
                    begun_at=begun_at, queue_seconds=trajectory.timings.queue_seconds, tokens=trajectory.policy_tokens,
                    generate_seconds=trajectory.timings.generate_seconds, busy=bench.busy(),
                )  # fmt: skip
        await self._partials.stop()
        self._publishing = True
        faults.point("worker.before_publish")
        with spans.child("trajectory", "producer", fixed=True) as span:
            created = await self._insist(lambda: bench.bus.create(subject, data, headers=span.headers))
            if span:
                span.set(sequence=created.sequence, nbytes=len(data), superseded=not created.won)
                if not created.won:
                    span.renumber()
        if created.won:
            bench.figures.trajectories += 1
            bench.figures.tokens += trajectory.policy_tokens
        else:
            bench.figures.superseded += 1
        faults.point("worker.trajectory_published")
        await delivery.ack()
        faults.point("worker.acknowledged")
        await self._partials.clear()

    async def _until_served(self) -> None:
        """Hold the task until the replica serves a version that may serve it."""
        bench, hold_seconds = self._bench, self._bench.settings.rollout.hold_seconds
        deadline = time.monotonic() + hold_seconds
        while True:
            replica = bench.replica
            match eligibility(replica.lineage, replica.version, self.task):
                case "serve":
                    return
                case "moved":
                    raise _Failed(
                        "version_moved", f"the replica has left version {self.task.exact_version} for {replica.version}"
                    )
            left = deadline - time.monotonic()
            if left <= 0:
                wanted = self.task.exact_version
                need = f"depth {self.task.not_before_depth}" if wanted is None else f"version {wanted}"
                raise _Failed("not_ready", f"{need} wasn't served within {hold_seconds:g} s; version {replica.version} is")
            await bench.change.wait(left)

    async def _generate(self) -> tuple[bytes, Trajectory]:
        """The trajectory and its bytes, which were decoded once."""
        bench, task = self._bench, self.task
        try:
            episode = await self._begin()
            await episode.run()
            faults.point("worker.generated")
            spans = episode.record.spans
            if not await bench.replica.vouched(episode.record.sampled_here):
                raise _Failed("generate", "a version that it was sampled from failed its proof on this replica")
            if task.exact_version is not None and any(span.version != task.exact_version for span in spans):
                raise _Failed("version_moved", f"sampled from version {spans[-1].version}, not {task.exact_version}")
            if self._is_stale():
                raise _Failed("stale", self._stale_reason())
            trajectory = self._trajectory(episode)
            data = encode_trajectory(trajectory)
            decode_trajectory(data)
            return data, trajectory
        except EnvironmentFailed as error:
            raise _Failed("environment", error.message) from error
        except MalformedError as error:
            raise _Failed("malformed", error.message) from error
        except UsageError as error:
            raise _Failed("generate", error.message, final=True) from error
        except EngineError as error:
            raise _Failed("generate", error.message) from error

    async def _begin(self) -> Episode:
        """An episode that goes on from the sample's PARTIAL where there is one that still counts."""
        bench, partials = self._bench, self._partials
        until = time.monotonic() + _LOG_SECONDS
        while partials.unknown() and (left := until - time.monotonic()) > 0:
            await bench.change.wait(left)
        await partials.begin()
        buffer = bench.settings.buffer
        keep_stale = buffer.over_stale not in ("drop", "requeue")
        found = partials.usable(buffer.max_staleness, keep_off_line=buffer.off_line == "keep", keep_stale=keep_stale)
        if found is not None:
            episode = await self._new_episode()
            try:
                await episode.resume(found)
            except Unusable as why:
                await episode.close()
                _log.warning("partial_unusable", group=self.task.group, sample=self.task.sample, reason=str(why))
                partials.forget("environment")
            else:
                bench.figures.partials.resumed += 1
                bench.figures.partials.tokens_resumed += found.policy_tokens
                return episode
        return await self._new_episode()

    async def _new_episode(self) -> Episode:
        bench, task = self._bench, self.task
        self._began_on = bench.engine.version
        try:
            environment = await bench.environment(task.environment)
        except TowlineError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"environment {task.environment}: {type(error).__name__}: {error}") from error
        self._episode = episode = Episode(
            task, environment, bench.engine, f"{self.sequence}.{self.delivery.num_delivered}",
            bench.settings.rollout, on_news=lambda: self._partials.keep(episode),
        )  # fmt: skip
        return episode

    def _trajectory(self, episode: Episode) -> Trajectory:
        bench, task, record = self._bench, self.task, episode.record
        assert episode.finish is not None
        return Trajectory(
            run=task.run,
            lane=task.lane,
            group=task.group,
            sample=task.sample,
            group_size=task.group_size,
            task_sequence=self.sequence,
            attempt=task.attempt,
            prompt_ref=task.prompt_ref,
            reference=task.reference,
            tokens=np.array(record.tokens, np.int32),
            loss_mask=record.mask,
            logprobs=record.all_logprobs,
            version_spans=tuple(record.spans),
            segments=tuple(record.segments),
            finish=episode.finish,
            sampling=task.sampling,
            seed=task.seed,
            engine=bench.engine.name,
            replica=bench.replica.name,
            timings=Timings(
                pulled_at=self._pulled_at,
                finished_at=time.time(),
                queue_seconds=record.queue_seconds,
                generate_seconds=record.generate_seconds,
            ),
        )

    def _is_stale(self) -> bool:
        """Only what is trained can be stale; and where the buffer masks or keeps what is over the bound, nothing is useless."""
        spans = self._episode.record.spans if self._episode is not None else []
        began = spans[0].version if spans else self._began_on
        return (
            self.task.lane == TRAIN
            and self._bench.settings.buffer.over_stale in ("drop", "requeue")
            and began is not None
            and stale(self._bench.replica.lineage, began, self._bench.settings.buffer.max_staleness)
        )

    def _stale_reason(self) -> str:
        lineage = self._bench.replica.lineage
        return f"began on version {self._began_on}; the run is at depth {lineage.depth(lineage.latest)}"

    async def _leave(self, why: Interruption) -> None:
        """What an interrupted attempt does about its task."""
        figures = self._bench.figures
        match why:
            case "cancelled":
                figures.cancelled += 1
                await self.delivery.ack()
            case "stale":
                raise _Failed("stale", self._stale_reason())
            case "moved":
                raise _Failed("version_moved", f"the replica left version {self.task.exact_version}")
            case "drained":
                figures.handed_over += 1
                await self._partials.hand_over(self._episode)
                await self.delivery.nak()
            case "ended":
                pass

    async def _fail(self, failed: _Failed) -> None:
        """The record first, then the ack. What no further attempt will be made of is kept whole in DEAD."""
        self._publishing = True
        await self._partials.stop()
        bench, task = self._bench, self.task
        figures = bench.figures.failures
        figures[failed.stage] = figures.get(failed.stage, 0) + 1
        _log.info(
            "attempt_failed", group=task.group, sample=task.sample, task_sequence=self.sequence, stage=failed.stage,
            final=failed.final, reason=failed.reason,
        )  # fmt: skip
        record = Failure(
            run=task.run,
            lane=task.lane,
            group=task.group,
            sample=task.sample,
            task_sequence=self.sequence,
            delivery=self.delivery.num_delivered,
            stage=failed.stage,
            final=failed.final,
            reason=failed.reason,
            replica=bench.replica.name,
        )
        last = failed.final or task.attempt + 1 >= bench.settings.buffer.max_attempts
        if failed.stage in _SAMPLE_S_OWN and last:
            await dead_letter(
                bench.bus, "rollout", self.delivery, failed.reason, failure=failed.stage, group=task.group, sample=task.sample,
                attempt=task.attempt,
            )  # fmt: skip
        faults.point("worker.before_failure")
        await self._insist(lambda: bench.bus.publish(bench.bus.topology.failure(task.group, task.sample), encode(record)))
        faults.point("worker.failure_published")
        await self.delivery.ack()
        if failed.final or failed.stage == "stale":
            await self._partials.clear()

    async def _insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until the bus takes it: what was generated is kept, and the delivery held, while it's away or full."""
        wait = _FIRST_RETRY_SECONDS
        while True:
            try:
                return await call()
            except UnavailableError as error:
                _log.warning("bus_waits", group=self.task.group, sample=self.task.sample, code=error.code, reason=error.message)
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MOST_RETRY_SECONDS)
