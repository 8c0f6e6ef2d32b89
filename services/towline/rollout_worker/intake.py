"""Pulls tasks for free slots and runs them: the evaluation of the served version first, then the train lane."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterable

import structlog

from towline.bus.client import Consumer, Delivery
from towline.bus.topology import IN_PROGRESS_SHARE
from towline.contract.control import ReissueRecord, TaskRecord, decode_control
from towline.contract.task import EVAL, TRAIN, Task
from towline.errors import MalformedError, UnavailableError
from towline.rollout_worker.attempt import Attempt, Interruption
from towline.rollout_worker.bench import Bench
from towline.rollout_worker.dead import dead_letter

PULL_SECONDS = 0.25
"""How long one pull waits for a first task; a new evaluation waits as long for its turn."""
_EVAL_PULL_SECONDS = 0.05
_GATHER_SECONDS = 0.003
"""Slots that come free together are pulled for together."""
_RETRY_SECONDS = 1.0
_log = structlog.get_logger("towline.rollout_worker")


class Intake:
    """Owns the running attempts; `busy` is how many slots they take. `run` it until `close`."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._slots = bench.engine.slots
        self._ack_wait_seconds = bench.settings.rollout.ack_wait_seconds
        self._attempts: dict[int, Attempt] = {}
        self._runners: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()
        self._closing = False
        self._quiet = asyncio.Event()
        self._broken: BaseException | None = None
        self._eval: tuple[int, Consumer] | None = None

    @property
    def busy(self) -> int:
        return len(self._runners)

    def interrupt(self, task_sequence: int, why: Interruption) -> None:
        if (attempt := self._attempts.get(task_sequence)) is not None:
            attempt.interrupt(why)

    def interrupt_all(self, why: Interruption) -> None:
        for attempt in list(self._attempts.values()):
            attempt.interrupt(why)

    def hand_over_unbegun(self) -> None:
        """What only waits needn't wait for the others' end."""
        for attempt in list(self._attempts.values()):
            if not attempt.begun:
                attempt.interrupt("drained")

    def review(self) -> None:
        """The LOG or the served version changed."""
        for attempt in list(self._attempts.values()):
            attempt.review()

    def close(self) -> None:
        """Pull no more; what is running goes on."""
        self._closing = True
        self._freed.set()
        self._bench.change.notify()

    async def quiet(self, seconds: float) -> None:
        """Until no pull is open, after `close`: what is given back before would come here again, and be lost with it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._quiet.wait()

    async def settled(self, seconds: float) -> bool:
        """Whether every attempt ended within that time."""
        if self._runners:
            await asyncio.wait(self._runners, timeout=seconds)
        return not self._runners

    async def run(self) -> None:
        """An attempt that breaks where none should ends it with that exception."""
        bus = self._bench.bus
        train = await bus.consumer(bus.topology.lane_consumer(TRAIN, self._slots, ack_wait_seconds=self._ack_wait_seconds))
        await train.update(ack_wait_seconds=self._ack_wait_seconds)
        heartbeat = asyncio.create_task(self._stay_in_progress())
        try:
            while not self._closing:
                try:
                    await self._pull(train)
                except UnavailableError as error:
                    _log.warning("pull_waits", reason=error.message)
                    await asyncio.sleep(_RETRY_SECONDS)
            self._quiet.set()
            await asyncio.Event().wait()  # the heartbeat goes on until the service ends
        finally:
            heartbeat.cancel()
            if self._eval is not None:
                await self._eval[1].close()
            await train.close()

    async def _pull(self, train: Consumer) -> None:
        version = self._bench.replica.version
        if version is None:
            await self._bench.change.wait(PULL_SECONDS)
            return
        free = await self._free_slots()
        if free and not self._closing and self._bench.feed.eval_is_issued(version):
            consumer = await self._eval_consumer(version)
            free -= await self._start(await consumer.fetch(free, _EVAL_PULL_SECONDS))
        if free and not self._closing:
            await self._start(await train.fetch(free, PULL_SECONDS))

    async def _free_slots(self) -> int:
        """Waits for one; where few are free, a moment for more."""
        pace, reserved = self._bench.pace, self._bench.reserved
        if pace.limit - self.busy - reserved() < max(pace.limit // 4, 1):
            self._freed.clear()
            while self.busy + reserved() >= pace.limit and not self._closing:
                await self._freed.wait()
                self._freed.clear()
            await asyncio.sleep(_GATHER_SECONDS)
        if self._broken is not None:
            raise self._broken
        return max(pace.limit - self.busy - reserved(), 0)

    def wake(self) -> None:
        """A slot came free that no attempt had."""
        self._freed.set()

    async def _eval_consumer(self, version: int) -> Consumer:
        if self._eval is None or self._eval[0] != version:
            if self._eval is not None:
                await self._eval[1].close()
                self._eval = None
            bus = self._bench.bus
            spec = bus.topology.lane_consumer(EVAL, self._slots, version, self._ack_wait_seconds)
            self._eval = (version, await bus.consumer(spec))
        return self._eval[1]

    async def _start(self, deliveries: Iterable[Delivery]) -> int:
        """Begin an attempt for each; the number of slots taken."""
        taken = 0
        for delivery in deliveries:
            if delivery.sequence in self._attempts:
                # The ack wait ran out on a stalled worker: the attempt that runs here still counts, and so will its ack.
                continue
            if self._closing:
                await delivery.nak()
                continue
            task = await self._task(delivery)
            if task is not None:
                taken += 1
                attempt = self._attempts[delivery.sequence] = Attempt(self._bench, delivery, task)
                runner = asyncio.create_task(attempt.run())
                self._runners.add(runner)
                runner.add_done_callback(functools.partial(self._ended, delivery.sequence))
        return taken

    async def _task(self, delivery: Delivery) -> Task | None:
        try:
            record = decode_control(delivery.data)
            if isinstance(record, TaskRecord | ReissueRecord):
                return record.task
            reason = f"a {type(record).__name__} on a task's subject"
        except MalformedError as error:
            reason = error.message
        _log.error("task_unreadable", sequence=delivery.sequence, reason=reason)
        await dead_letter(self._bench.bus, "rollout", delivery, reason)
        await delivery.ack()
        return None

    def _ended(self, sequence: int, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        del self._attempts[sequence]
        self._freed.set()
        self._bench.freed()
        if not runner.cancelled() and (error := runner.exception()) is not None:
            _log.error("attempt_broke", task_sequence=sequence, exc_info=error)
            self._broken = error

    async def _stay_in_progress(self) -> None:
        while True:
            await asyncio.sleep(self._ack_wait_seconds * IN_PROGRESS_SHARE)
            for attempt in list(self._attempts.values()):
                await attempt.delivery.in_progress()
