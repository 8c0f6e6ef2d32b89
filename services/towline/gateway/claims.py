"""Claimed sessions: each is bound to one admitted sample of lane session, whose trajectory it becomes, or which it gives back.

The session's name follows from the task, and it is created only where none stands. So a task that is delivered a second time, to
any gateway, finds its session and adopts it; and no sample is ever two clients'. docs/design/061-claims.md has each crash point.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
import xxhash

from towline import faults
from towline.bus.client import Bus, Delivery
from towline.bus.topology import IN_PROGRESS_SHARE, TRAJECTORY
from towline.config import Settings
from towline.contract.codec import encode
from towline.contract.control import ReissueRecord, TaskRecord, decode_control
from towline.contract.outcome import Failure
from towline.contract.task import SESSION, Task
from towline.errors import ConflictError, MalformedError, MissingError
from towline.gateway.answers import ApiError
from towline.gateway.bodies import ClaimBody
from towline.gateway.claims_keys import ClaimKey
from towline.gateway.claims_lane import Lane
from towline.gateway.fleet import Fleet
from towline.gateway.routing import Constraint
from towline.gateway.samples import NoReplica, NotReady
from towline.gateway.session_store import Claim, Content, End, Held, SessionStore, conflict
from towline.replica.control import ControlFeed
from towline.runtime.metrics import Metrics

WAIT_SECONDS = 0.5
"""How often a task that waits for its version is looked at, where nothing is heard of a change."""
_log = structlog.get_logger("towline.gateway")


class Claims:
    """Binds sessions to tasks, and ends those that can't be finished. `run` it."""

    def __init__(
        self, settings: Settings, *, bus: Bus, store: SessionStore, fleet: Fleet, metrics: Metrics, replica: str
    ) -> None:
        self._settings, self._bus, self._store, self._fleet, self._replica = settings, bus, store, fleet, replica
        self.feed = ControlFeed(bus)
        self.ack_wait_seconds = settings.rollout.ack_wait_seconds
        self._lane = Lane(bus, settings.gateway.sessions.max_claims, self.ack_wait_seconds)
        self._claimed = metrics.counter("claims_total", "tasks that became sessions")
        self._adopted = metrics.counter("claims_adopted_total", "tasks delivered again whose session went on")
        self._given_up = metrics.counter("claims_given_up_total", "claimed sessions that became no trajectory", ["stage"])

    async def run(self) -> None:
        """For ever; at once done where the run has no such lane."""
        if self.open:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.feed.run())
                await self.feed.caught_up.wait()  # what was taken back already is given to nobody
                group.create_task(self._lane.run())

    def drain(self) -> None:
        """Bind no more; sessions that stand are the other gateways'."""
        self._lane.close("the gateway is draining")

    @property
    def open(self) -> bool:
        return self._settings.buffer.session_groups > 0

    # Binding

    async def claim(
        self, tenant: str, body: ClaimBody, wait_seconds: float, key: ClaimKey | None, gone: Callable[[], Awaitable[bool]]
    ) -> Held | None:
        """A session of the tenant's that is bound to a task; None where there is none to be had in time, or once who asked for it
        is `gone`.

        `NotReady` where no replica serves a version that the task and the claim accept, `NoReplica` where there is none at all.
        """
        until = time.monotonic() + wait_seconds
        while (delivery := await self._lane.take(until - time.monotonic())) is not None:
            faults.point("gateway.task_taken")
            try:
                if await gone():
                    await delivery.nak()
                    return None
                held = await self._bound(delivery, tenant, body, until, key)
            except BaseException:
                await delivery.nak()  # whatever went wrong isn't the sample's fault
                raise
            if held is not None:
                return held
        return None

    async def known(self, tenant: str, key: ClaimKey) -> Held | None:
        """What was claimed under the key already."""
        held = None if key.session is None else await self._store.look(key.session)
        return held if held is not None and held.entry.tenant == tenant else None

    async def _bound(self, delivery: Delivery, tenant: str, body: ClaimBody, until: float, key: ClaimKey | None) -> Held | None:
        """The delivery's session; None where it needs none (any more)."""
        task = await self._task(delivery)
        if task is None:
            return None
        name = session_name(self._settings.run.name, delivery.sequence)
        standing = await self._store.look(name)
        if standing is not None and standing.content.task == task:
            await self._adopt(standing, delivery)
            return None
        if standing is not None:  # of another CONTROL, whose storage was lost
            await self._store.delete(standing)
        trajectory = self._bus.topology.trajectory(task.group, task.sample)
        gone = self.feed.cancelled(delivery.sequence) or task.deadline <= time.time()
        if gone or (delivery.num_delivered > 1 and await self._bus.last(TRAJECTORY, trajectory) is not None):
            await delivery.ack()
            return None
        if body.environment not in (None, task.environment):
            raise ApiError(
                409, "EnvironmentMismatch", f"the next task is for environment {task.environment!r}, not {body.environment!r}"
            )
        await self._until_served(task, body.constraint, delivery, until)
        wanted = self._settings.gateway.sessions.claim_seconds
        seconds = wanted if body.ttl_seconds is None else min(body.ttl_seconds, wanted)
        content = Content(
            created=time.time(), variables=body.chat_template_kwargs, tools=body.tools, task=task,
            min_version=body.constraint.min_version, exact_version=body.constraint.exact_version,
            claim=Claim(
                task_sequence=delivery.sequence, delivery=delivery.num_delivered, receipt=delivery.receipt, lane=task.lane,
                group=task.group, sample=task.sample, key="" if key is None else key.name,
            ),
        )  # fmt: skip
        if key is not None:
            await key.note(name)
        try:
            held = await self._store.create(tenant, content, seconds, name)
        except ConflictError:  # delivered to two gateways at once, as after a lost sign of life: the other one's stands
            return None
        faults.point("gateway.session_claimed")
        self._claimed.inc()
        return held

    async def _task(self, delivery: Delivery) -> Task | None:
        try:
            record = decode_control(delivery.data)
            if isinstance(record, TaskRecord | ReissueRecord) and record.task.lane == SESSION:
                return record.task
            reason = "it is no task of lane session"
        except MalformedError as error:
            reason = error.message
        _log.error("task_unreadable", sequence=delivery.sequence, reason=reason)
        await self._bus.dead("gateway", delivery.data, reason, sequence=delivery.sequence, subject=delivery.subject)
        await delivery.ack()
        return None

    async def _adopt(self, standing: Held, delivery: Delivery) -> None:
        """The task's session stands: this gateway answers for the delivery now. An earlier delivery's receipt stays good."""
        if standing.content.state in ("finished", "ended"):
            await delivery.ack()
            return
        await delivery.in_progress()
        self._adopted.inc()
        _log.info("session_adopted", session=standing.id, delivery=delivery.num_delivered)

    async def _until_served(self, task: Task, asked: Constraint, delivery: Delivery, until: float) -> None:
        """Until a replica serves what the task's first turn needs; `NotReady` or `NoReplica` where none does in time."""
        told = time.monotonic()
        while True:
            try:
                constraint = self.constraint(task, asked)
                if any(one.usable and constraint.met_by(self._fleet.lineage, one.version) for one in self._fleet.candidates()):
                    return
                refusal: Exception = NotReady(
                    constraint, self._fleet.applied(),
                    f"the next task needs depth {task.not_before_depth}; served are {list(self._fleet.versions())}",
                )  # fmt: skip
                if not self._fleet.versions():
                    refusal = NoReplica("no replica serves any version; start rollout workers with gateway.doors = true")
            except NotReady as error:
                refusal = error
            left = until - time.monotonic()
            if left <= 0 or self._lane.closed:
                raise refusal
            await self._fleet.wait(min(left, WAIT_SECONDS))
            if time.monotonic() - told > self.ack_wait_seconds * IN_PROGRESS_SHARE:
                await delivery.in_progress()
                told = time.monotonic()

    def constraint(self, task: Task, asked: Constraint) -> Constraint:
        """What a turn of the task's session accepts: what was `asked`, and a version of the line with the task's depth."""
        lineage, depth = self._fleet.lineage, task.not_before_depth
        least = lineage.version_reaching(depth) if depth else None
        if depth and least is None:
            raise NotReady(asked, self._fleet.applied(), f"the task needs depth {depth}, which the LOG hasn't reached")
        try:
            if asked.exact_version is not None:
                if not lineage.on_line(asked.exact_version) or lineage.depth(asked.exact_version) < depth:
                    raise NotReady(
                        asked,
                        self._fleet.applied(),
                        f"version {asked.exact_version} may not serve the task: it needs depth {depth}",
                    )
                return asked
            if asked.min_version is not None and lineage.depth(asked.min_version) >= depth:
                return asked
        except MissingError:  # newer than what was read of the LOG: its replica's door knows
            return asked
        return Constraint(min_version=least)

    # Ending

    async def check(self, held: Held) -> None:
        """409 where the session's sample can't be trained any more: it is ended then."""
        claim, content = held.content.claim, held.content
        if claim is None or content.state != "open":
            return
        if (end := self.over(claim)) is not None:
            await self.end(held, end)
            raise conflict(f"session {held.id} is over: {end.reason}; claim another task")

    def over(self, claim: Claim) -> End | None:
        """Why the sample can't count any more, as far as CONTROL and the LOG tell; None where it can."""
        if self.feed.cancelled(claim.task_sequence):
            return End(stage=None, reason="the buffer has taken its task back")
        if claim.began_on is not None and self._is_stale(claim.began_on):
            return End(stage="stale", reason=f"it began on version {claim.began_on}, which is too old to be trained on by now")
        return None

    def _is_stale(self, version: int) -> bool:
        buffer, lineage = self._settings.buffer, self._fleet.lineage
        if buffer.over_stale not in ("drop", "requeue"):
            return False
        try:
            return lineage.depth(lineage.latest) > lineage.effective_depth(version) + buffer.max_staleness
        except MissingError:  # of a replica that has read further in the LOG
            return False

    async def end(self, held: Held, end: End) -> Held:
        """Give the sample back: marked, told, acked, in this order; `ApiError` where the session was changed meanwhile."""
        content = msgspec.structs.replace(held.content, state="ending", end=end)
        held = await self._store.save(held, content)
        faults.point("gateway.end_marked")
        return await self.settle(held)

    async def settle(self, held: Held) -> Held:
        """The rest of `end`, by whichever gateway. A failure counts once, however often it is published."""
        claim, end = held.content.claim, held.content.end
        assert claim is not None
        assert end is not None
        if end.stage is not None:
            failure = Failure(
                run=self._settings.run.name, lane=claim.lane, group=claim.group, sample=claim.sample,
                task_sequence=claim.task_sequence, delivery=claim.delivery, stage=end.stage, reason=end.reason,
                replica=f"gateway-{self._replica}",
            )  # fmt: skip
            await self._bus.publish(self._bus.topology.failure(claim.group, claim.sample), encode(failure))
            faults.point("gateway.failure_published")
        await self._bus.ack_of(claim.receipt)
        faults.point("gateway.end_acknowledged")
        self._given_up.labels(end.stage or "cancelled").inc()
        _log.info("session_given_up", session=held.id, group=claim.group, sample=claim.sample, reason=end.reason)
        return await self._store.save(held, msgspec.structs.replace(held.content, state="ended"))


def session_name(run: str, task_sequence: int) -> str:
    """Always the same one for a task: so a redelivery finds what was made of it."""
    return f"sess-{xxhash.xxh3_128_hexdigest(f'{run}/{task_sequence}'.encode())}"
