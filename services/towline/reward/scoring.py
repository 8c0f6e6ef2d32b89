"""One delivery of a trajectory to its end: a create-only score, a final failure, or another try later.

The order is always the fact first, then the ack, so that a crash between the two only repeats work: a score that stands
already stays, whoever made it. docs/design/001-protocol.md, section 6, has the rules.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import structlog

from towline import faults, spans
from towline.bus.client import Bus
from towline.bus.consumer import Delivery
from towline.bus.topology import IN_PROGRESS_SHARE, OUTCOME
from towline.config import RewardSettings
from towline.contract.codec import digest, encode
from towline.contract.groups import parse_group
from towline.contract.outcome import Failure, FailureStage, Score
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.errors import MalformedError, UnavailableError, VerifierError
from towline.reward.groups import Groups, Stored
from towline.spans import Span
from towline.verifiers.base import Reward, Verifier, check_reward, check_rewards, sample_of
from towline.verifiers.runner import Runner
from towline.verifiers.tokenizer import Tokenizer

_log = structlog.get_logger("towline.reward")

RETRY_SECONDS = (1.0, 5.0, 15.0, 30.0)
"""Before the second, third, … attempt of a verifier; the last one repeats."""
CLIENT = "client"
"""A score's verifier where the sample's client said the reward."""
ROOM_SECONDS = 5.0
"""Before a score that the bus had no room or no time for is tried again."""


@dataclass(slots=True)
class Counts:
    """What became of the deliveries so far."""

    scored: int = 0
    failed: int = 0
    retried: int = 0
    repeated: int = 0
    """Scores that stood already, by an earlier delivery or another replica."""
    reward_sum: float = 0.0
    last_error: str = ""


class Scorer:
    """Scores deliveries of the reward consumer. `handle` never raises for what is wrong with one sample."""

    def __init__(
        self,
        bus: Bus,
        settings: RewardSettings,
        verifier: Verifier,
        tokenizer: Tokenizer,
        replica: str,
        *,
        take_given: bool = False,
    ) -> None:
        self.counts = Counts()
        self.on_verified: Callable[[float], None] = lambda seconds: None
        """Called with the seconds of each call of the verifier, also where it failed."""
        self._bus = bus
        self._settings = settings
        self._verifier = verifier
        self._runner = Runner(verifier, timeout_seconds=settings.timeout_seconds, concurrency=settings.concurrency)
        self._tokenizer = tokenizer
        self._replica, self._take_given = replica, take_given
        self._groups = Groups(bus) if settings.scope == "group" else None
        self._at_work: dict[int, tuple[Delivery, float]] = {}
        self._logged_at = 0.0

    @property
    def stuck(self) -> int:
        """Verifier calls that ran over their time and still go on."""
        return self._runner.stuck

    @contextlib.contextmanager
    def _verifying(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.on_verified(time.perf_counter() - began)

    def close(self) -> None:
        self._runner.close()

    async def keep_alive(self) -> None:
        """Tell the server of deliveries that take long; runs until it is cancelled."""
        seconds = self._settings.ack_wait_seconds * IN_PROGRESS_SHARE
        while True:
            await asyncio.sleep(seconds)
            late = time.monotonic() - seconds
            for delivery, started in list(self._at_work.values()):
                if started < late:
                    await delivery.in_progress()

    async def handle(self, delivery: Delivery) -> None:
        """Bring one delivery to its end and answer it."""
        self._at_work[delivery.sequence] = (delivery, time.monotonic())
        try:
            with spans.follow("reward", delivery.headers) as span:
                if span:
                    span.set(delivery=delivery.num_delivered, verifier=self._verifier.name, replica=self._replica)
                await self._handle(delivery)
        except UnavailableError as error:
            self.counts.last_error = error.message
            await delivery.nak(ROOM_SECONDS)
        finally:
            self._at_work.pop(delivery.sequence, None)

    async def _handle(self, delivery: Delivery) -> None:
        faults.point("reward.taken")
        try:
            stored = self._decode(delivery)
        except MalformedError as error:
            await self._give_up(delivery, "malformed", error)
            return
        if delivery.num_delivered > 1 and await self._stands(stored.trajectory):
            self.counts.repeated += 1
            await delivery.ack()
            return
        try:
            if self._groups is None:
                await self._score_sample(stored)
            else:
                await self._score_group(stored, self._groups)
        except VerifierError as error:
            self.counts.last_error = error.message
            self._log_failure("verifier_failed", error, delivery)
            if delivery.num_delivered < self._settings.max_attempts:
                self.counts.retried += 1
                await delivery.nak(RETRY_SECONDS[min(delivery.num_delivered, len(RETRY_SECONDS)) - 1])
                return
            await self._give_up(delivery, "verify", error)
            return
        await delivery.ack()
        faults.point("reward.acknowledged")

    def _log_failure(self, event: str, error: MalformedError | VerifierError, delivery: Delivery) -> None:
        """At most one line a second: a verifier that always fails would fill the disk."""
        now = time.monotonic()
        if now - self._logged_at >= 1.0:
            self._logged_at = now
            _log.warning(event, reason=error.message, subject=delivery.subject, delivery=delivery.num_delivered)

    def _decode(self, delivery: Delivery) -> Stored:
        trajectory = decode_trajectory(delivery.data)
        topology = self._bus.topology
        if topology.trajectory(trajectory.group, trajectory.sample) != delivery.subject or trajectory.run != topology.run:
            raise MalformedError(
                f"the trajectory says run {trajectory.run}, group {trajectory.group}, sample {trajectory.sample}; "
                f"its subject is {delivery.subject}",
                code="subject",
                data=delivery.data,
            )
        return Stored(trajectory, delivery.sequence, digest(delivery.data), delivery.headers)

    async def _stands(self, trajectory: Trajectory) -> bool:
        return await self._bus.last(OUTCOME, self._bus.topology.score(trajectory.group, trajectory.sample)) is not None

    async def _score_sample(self, stored: Stored) -> None:
        (reward,) = await self._judged([stored])
        faults.point("reward.verified")
        with spans.child("score", "producer", fixed=True) as span:
            created = await self._bus.create(*self._message(stored, reward), headers=span.headers)
            _tell(span, reward, won=created.won)
        faults.point("reward.published")
        self._count(created.won, [reward])

    async def _score_group(self, stored: Stored, groups: Groups) -> None:
        """All of the group's scores at once where this was its last trajectory; else nothing, its last one will do it."""
        number = stored.trajectory.group
        groups.remember(number, stored)
        async with groups.turn(number) as scored:
            members = None if scored else await groups.complete(stored)
            if members is None:
                return
            rewards = await self._judged(members)
            messages = [self._message(member, reward) for member, reward in zip(members, rewards, strict=True)]
            faults.point("reward.verified")
            made = [spans.follow("score", member.headers, "producer", fixed=True) for member in members]
            headers = {place: span.headers for place, span in enumerate(made) if span.headers is not None}
            won = await self._bus.create_all(messages, headers=headers) is not None
            for span, reward in zip(made, rewards, strict=True):
                _tell(span, reward, won=won)
                span.end()
            self._count(won, rewards)
            faults.point("reward.published")
            groups.close(number)

    async def _judged(self, members: list[Stored]) -> list[Reward]:
        """One reward a member: what its client said, where the run lets it, else the verifier's."""
        given = [self._given(member) for member in members]
        found = [check_reward(said, CLIENT) for said in given if said is not None]
        if len(found) == len(members):
            return found
        samples = [sample_of(member.trajectory, self._tokenizer) for member in members]
        with spans.child("verify"), self._verifying():
            if self._groups is None:
                judged = [check_reward(await self._runner.run(samples[0]), self._verifier.name)]
            else:
                judged = check_rewards(await self._runner.run(samples), len(samples), self._verifier.name)
        return [own if said is None else check_reward(said, CLIENT) for said, own in zip(given, judged, strict=True)]

    def _given(self, stored: Stored) -> Reward | None:
        given = stored.trajectory.given_reward
        return None if given is None or not self._take_given else Reward(given.value, given.components)

    def _count(self, won: bool, rewards: list[Reward]) -> None:
        if won:
            self.counts.scored += len(rewards)
            self.counts.reward_sum += sum(reward.value for reward in rewards)
        else:
            self.counts.repeated += len(rewards)

    def _message(self, stored: Stored, reward: Reward) -> tuple[str, bytes]:
        trajectory = stored.trajectory
        score = Score(
            run=trajectory.run,
            lane=trajectory.lane,
            group=trajectory.group,
            sample=trajectory.sample,
            group_size=trajectory.group_size,
            task_sequence=trajectory.task_sequence,
            trajectory_sequence=stored.sequence,
            trajectory_digest=stored.digest,
            reward=reward.value,
            components=reward.components,
            verifier=self._verifier.name if self._given(stored) is None else CLIENT,
            policy_tokens=trajectory.policy_tokens,
            total_tokens=trajectory.tokens.size,
            version_spans=trajectory.version_spans,
            finish=trajectory.finish,
        )
        return self._bus.topology.score(trajectory.group, trajectory.sample), encode(score)

    async def _give_up(self, delivery: Delivery, stage: FailureStage, error: MalformedError | VerifierError) -> None:
        """The sample can't be scored: keep the message for people, tell the buffer, then ack."""
        self.counts.failed += 1
        self.counts.last_error = error.message
        self._log_failure("given_up", error, delivery)
        await self._bus.dead("reward", delivery.data, error.message, failure=stage, subject=delivery.subject)
        who = _identify(self._bus.topology.relative(delivery.subject), delivery.data)
        if who is not None:
            failure = Failure(
                run=self._bus.topology.run,
                lane=who.lane,
                group=who.group,
                sample=who.sample,
                task_sequence=who.task_sequence,
                delivery=delivery.num_delivered,
                stage=stage,
                final=True,
                reason=error.message,
                replica=self._replica,
            )
            faults.point("reward.before_failure")
            await self._bus.publish(self._bus.topology.failure(who.group, who.sample), encode(failure))
            faults.point("reward.failure_published")
        await delivery.ack()


def _tell(span: Span, reward: Reward, *, won: bool) -> None:
    if span:
        span.set(reward=reward.value, superseded=not won)
        if not won:
            span.renumber()


class _Who(msgspec.Struct):
    """Whose trajectory it is, as far as it can be known: the subject is certain, the rest is read leniently."""

    lane: str = ""
    task_sequence: int = 0
    group: int = 0
    sample: int = 0


_who = msgspec.msgpack.Decoder(_Who)


def _identify(subject: str, data: bytes) -> _Who | None:
    """Group and sample from `trajectory.GROUP.SAMPLE`, lane ("" where unreadable) and task from the message; None where the
    subject names no group."""
    _, token, sample = subject.split(".")
    group = parse_group(token)
    if group is None or not sample.isdecimal():
        return None
    try:
        found = _who.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        found = _Who()
    return _Who(found.lane, found.task_sequence, group, int(sample))
