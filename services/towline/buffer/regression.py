"""Streams that lost their tail, or were made anew: how that is noticed, and what it takes to go on.

A CONTROL that went backwards stops the run as `stream_regressed`: decisions are gone that others acted on. TRAJECTORY and
OUTCOME can be mended, since CONTROL says what must be in them: a sample without its trajectory is issued again, one whose
score is gone is scored again, and a group with a score whose bytes are gone is dropped as `trajectory_lost` (a score is
create-only, so the sample can't get another) and a new one takes its place.
"""

from __future__ import annotations

import asyncio

import structlog

from towline.buffer.groups import Group, Sample
from towline.buffer.state import State
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME, TRAJECTORY, ConsumerSpec, StreamSpec
from towline.bus.wire import NOT_FOUND, ApiError
from towline.contract.codec import digest
from towline.contract.groups import is_external, parse_group
from towline.errors import InvariantError
from towline.store.lineage import Lineage

TRAJECTORY_LOST = "trajectory_lost"
LOOKUPS_IN_FLIGHT = 64
_NANOSECONDS = 1_000_000_000
_log = structlog.get_logger("towline.buffer")


class StreamWatch:
    """Remembers each stream's creation and last message; `look` names the streams that no longer have them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._marks: dict[str, tuple[str, int, float]] = {}
        self.fill: dict[str, float] = {}
        """Stream -> share of its bytes that is taken, as last seen."""

    async def look(self) -> list[StreamSpec]:
        """`InvariantError` (stream_regressed) where CONTROL is one of them."""
        lost = []
        for spec in (CONTROL, TRAJECTORY, OUTCOME):
            if not await self._still_there(spec):
                lost.append(spec)
        if CONTROL in lost:
            raise regressed(f"{self._bus.topology.stream(CONTROL)} lost messages that stood in it")
        return lost

    async def _still_there(self, spec: StreamSpec) -> bool:
        name = self._bus.topology.stream(spec)
        state = await self._bus.stream_state(spec)
        self.fill[spec.key] = state.bytes / state.max_bytes if state.max_bytes > 0 else 0.0
        created_at, last, at = self._marks.get(name, (state.created_at, 0, 0.0))
        there = state.created_at == created_at and state.last_sequence >= last
        if there and last > 0 and state.first_sequence <= last:
            message = await self._bus.jetstream.get_from_leader(name, {"seq": last})
            there = message is None or at in (0.0, message.at)  # None: purged since
        newest = None
        if state.messages:
            newest = await self._bus.jetstream.get_from_leader(name, {"seq": state.last_sequence})
        self._marks[name] = (state.created_at, state.last_sequence, newest.at if newest is not None else 0.0)
        return there


def regressed(what: str) -> InvariantError:
    return InvariantError(f"{what}: restore the bus's storage, or fork a new run from a version", code="stream_regressed")


async def check_control(bus: Bus, state: State, lineage: Lineage, batch_cursor: int) -> None:
    """At a take-over: `InvariantError` where the LOG or the other streams know of records that CONTROL hasn't."""
    if batch_cursor > state.control_sequence:
        raise regressed(
            f"CONTROL ends at {state.control_sequence}, version {lineage.latest} consumed the batch at {batch_cursor}"
        )
    if state.next_group == 0 and await _has_own_trajectories(bus):
        raise regressed("CONTROL never issued a task, and TRAJECTORY has had trajectories")


async def _has_own_trajectories(bus: Bus) -> bool:
    """Whether TRAJECTORY has had samples of tasks, as far as its first and last message tell: those from outside need none."""
    stream, found = bus.topology.stream(TRAJECTORY), await bus.stream_state(TRAJECTORY)
    if not found.messages:
        return found.last_sequence > 0
    for sequence in {found.first_sequence, found.last_sequence}:
        message = await bus.jetstream.get_from_leader(stream, {"seq": sequence})
        group = None if message is None else parse_group(bus.topology.relative(message.subject).split(".")[1])
        if group is not None and not is_external(group):
            return True
    return False


async def mend(bus: Bus, state: State) -> dict[str, int]:
    """Look at every open group's samples in TRAJECTORY; mark in the state what must be issued again or dropped, and have
    reward score anew what it has acknowledged and OUTCOME lacks. How many samples of each."""
    found = {"dropped": 0, "reissued": 0, "rescored": 0}
    spec = bus.topology.reward_consumer()
    acknowledged = (await _consumer_info(bus, spec))[0]
    gate = asyncio.Semaphore(LOOKUPS_IN_FLIGHT)
    rescore: list[int] = []

    async def look(group: Group, index: int, sample: Sample | None) -> None:
        async with gate:
            message = await bus.last(TRAJECTORY, bus.topology.trajectory(group.number, index))
        scored = sample.scored if sample is not None else None
        if scored is not None:
            if message is None or (message.sequence, digest(message.data)) != (scored.sequence, scored.digest):
                lose(group, sample)
        elif message is None:
            if group.number in state.offers:
                return  # it may never have come
            if group.is_external:
                lose(group, sample)
                return
            state.lost[group.number, index] = None
            found["reissued"] += 1
        elif message.sequence <= acknowledged:
            rescore.append(message.sequence)

    def lose(group: Group, sample: Sample | None) -> None:
        found["dropped"] += 1
        if group.number in state.offers:
            state.refused.setdefault(group.number, TRAJECTORY_LOST)
        elif sample is not None:
            state.doom(group, sample, TRAJECTORY_LOST)

    async with asyncio.TaskGroup() as tasks:
        for group in (*state.groups.values(), *state.offers.values()):
            for index, sample in enumerate(group.samples if group.batch is None else ()):
                if sample is not None or group.is_external:
                    tasks.create_task(look(group, index, sample))
    if rescore:
        found["rescored"] = len(rescore)
        await _deliver_again(bus, spec, min(rescore))
    _log.warning("mended", **found)
    return found


async def _consumer_info(bus: Bus, spec: ConsumerSpec) -> tuple[int, bool]:
    """(ack floor, whether the consumer exists)."""
    try:
        info = await bus.jetstream.call("look at reward's consumer", f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
    except ApiError as error:
        if error.code == NOT_FOUND:
            return 0, False
        raise error.translated("look at reward's consumer") from None
    return int(info["ack_floor"]["stream_seq"]), True


async def _ack_wait_nanoseconds(bus: Bus, spec: ConsumerSpec) -> int:
    """What reward.ack_wait_seconds made of the consumer that is there."""
    try:
        info = await bus.jetstream.call("look at reward's consumer", f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
    except ApiError:
        return int(spec.ack_wait_seconds * _NANOSECONDS)
    return int(info["config"]["ack_wait"])


async def _deliver_again(bus: Bus, spec: ConsumerSpec, start: int) -> None:
    """Reward's consumer anew, from `start` on: its replicas find it again by name. Where one of them made it in between,
    it begins at the stream's first message, which repeats more; scores are create-only, so nothing counts twice."""
    wait = await _ack_wait_nanoseconds(bus, spec)
    config = {
        "name": spec.durable,
        "durable_name": spec.durable,
        "filter_subjects": list(spec.filters),
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": start,
        "ack_policy": "explicit",
        "ack_wait": wait,
        "max_deliver": -1,
        "max_ack_pending": spec.max_ack_pending,
    }
    try:
        await bus.jetstream.call("reset reward's consumer", f"CONSUMER.DELETE.{spec.stream}.{spec.durable}")
        await bus.jetstream.call(
            "reset reward's consumer", f"CONSUMER.CREATE.{spec.stream}.{spec.durable}",
            {"stream_name": spec.stream, "config": config, "action": "create"},
        )  # fmt: skip
    except ApiError as error:
        _log.warning("reward_consumer_kept", reason=str(error))  # made by a replica meanwhile
