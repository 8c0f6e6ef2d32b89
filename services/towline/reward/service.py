"""The reward service: TRAJECTORY in, scores and failures in OUTCOME out. Any number of replicas share the work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

from towline.bus.client import Bus, Consumer, Delivery
from towline.config import Settings
from towline.errors import UnavailableError, VerifierError
from towline.reward.scoring import Scorer
from towline.runtime.run_end import run_has_ended
from towline.runtime.service import Service
from towline.store.objects import ObjectStore
from towline.verifiers.base import load_verifier
from towline.verifiers.tokenizer import stored_tokenizer

FETCH = 256
"""Deliveries asked for at a time."""
MOST_AT_WORK = 1024
"""Deliveries in hand; verifiers that wait for something else (a sandbox, a judge) need many."""
FETCH_SECONDS = 1.0
END_POLL_SECONDS = 1.0
BUS_AWAY_SECONDS = 1.0
STUCK_LIMIT = 64
"""Verifier calls that ran over their time and go on: more, and a restart is the only way to get their threads back."""


class RewardService(Service):
    """Pulls trajectories, scores each, acks it. Ends when the run has ended."""

    name: ClassVar[str] = "reward"

    def __init__(self, settings: Settings, *, bus: Bus, objects: ObjectStore, replica: str) -> None:
        super().__init__(settings, bus=bus, objects=objects, replica=replica)
        verifier = load_verifier(settings.reward.function, settings.reward.arguments)
        tokenizer = stored_tokenizer(objects, settings.run.name)
        self._scorer = Scorer(
            bus, settings.reward, verifier, tokenizer, f"{self.name}.{replica}",
            take_given=settings.gateway.sessions.client_rewards,
        )  # fmt: skip
        self._scorer.on_verified = self.metrics.histogram(
            "verifier_duration_seconds", "Calls of the verifier: a sample's, or a group's where it compares"
        ).observe
        self._at_work: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()

    def figures(self) -> Mapping[str, Any]:
        counts = self._scorer.counts
        return {
            "scored": counts.scored,
            "failed": counts.failed,
            "retried": counts.retried,
            "repeated": counts.repeated,
            "reward_mean": counts.reward_sum / counts.scored if counts.scored else None,
            "at_work": len(self._at_work),
            "stuck": self._scorer.stuck,
            "last_error": counts.last_error,
        }

    async def run(self) -> None:
        seconds = self.settings.reward.ack_wait_seconds
        consumer = await self.bus.consumer(self.bus.topology.reward_consumer(ack_wait_seconds=seconds))
        await consumer.update(ack_wait_seconds=seconds)
        self.health.ready()
        keeping = asyncio.create_task(self._scorer.keep_alive(), name="keep-alive")
        ending = asyncio.create_task(self._until_end(), name="run-end")
        pulling = asyncio.create_task(self._pull(consumer), name="pull")
        try:
            await asyncio.wait([ending, pulling], return_when=asyncio.FIRST_COMPLETED)
            for task in (ending, pulling):
                if task.done():
                    task.result()
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            # What is in hand is finished, so that nobody waits for its redelivery.
            await asyncio.gather(*self._at_work)
            for task in (keeping, ending):
                task.cancel()
            await asyncio.gather(keeping, ending, return_exceptions=True)
            self._scorer.close()
            await consumer.close()

    async def _until_end(self) -> None:
        """Return when asked to drain, or when the run has ended and nothing is left to score."""
        while not self.draining.is_set():
            with contextlib.suppress(UnavailableError):
                if not self._at_work and await run_has_ended(self.bus, self.settings.run.steps):
                    self.log.info("run_ended", scored=self._scorer.counts.scored)
                    return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_POLL_SECONDS):
                    await self.draining.wait()

    async def _pull(self, consumer: Consumer) -> None:
        while True:
            if self._scorer.stuck > STUCK_LIMIT:
                raise VerifierError(
                    f"{self._scorer.stuck} verifier calls ran over their {self.settings.reward.timeout_seconds:g} s and go on; "
                    "starting anew to be rid of them",
                    code="verifier_stuck",
                )
            try:
                deliveries = await consumer.fetch(min(FETCH, MOST_AT_WORK - len(self._at_work)), FETCH_SECONDS)
            except UnavailableError as error:
                self.health.not_ready(f"bus: {error.message}")
                await asyncio.sleep(BUS_AWAY_SECONDS)
                continue
            self.health.ready()
            for delivery in deliveries:
                self._begin(delivery)
            while len(self._at_work) >= MOST_AT_WORK:
                self._room.clear()
                await self._room.wait()

    def _begin(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._scorer.handle(delivery))
        self._at_work.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._at_work.discard(task)
        self._room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its delivery comes again; a fault of ours must be seen, and mustn't stop the others.
            self.log.error("scoring_crashed", exc_info=error)
            self._scorer.counts.last_error = f"{type(error).__name__}: {error}"
