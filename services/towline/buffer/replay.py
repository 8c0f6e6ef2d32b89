"""The state of the run from its streams: the newest snapshot that can be read, CONTROL's tail, then OUTCOME's."""

from __future__ import annotations

import asyncio

import structlog

from towline.buffer.dump import decode_state
from towline.buffer.regression import regressed
from towline.buffer.state import State
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME
from towline.bus.wire import Blobs
from towline.contract.control import SnapshotRecord, decode_control
from towline.contract.groups import is_external
from towline.contract.outcome import decode_outcome
from towline.errors import CorruptError, InvariantError, MalformedError, MissingError

_log = structlog.get_logger("towline.buffer")


async def rebuild(bus: Bus, blobs: Blobs) -> State:
    """CONTROL's part of it, to the end. `InvariantError` where CONTROL's beginning is gone and no snapshot holds it."""
    state = await _from_snapshot(bus, blobs)
    first = (await bus.stream_state(CONTROL)).first_sequence
    if state is None or state.control_sequence + 1 < first:
        if first > 1:
            raise InvariantError(
                f"CONTROL begins at {first} and no snapshot can be read: restore the store's blobs, or fork a new run",
                code="snapshot_missing",
            )
        state = State()
    await read_control(bus, state)
    return state


async def read_control(bus: Bus, state: State) -> None:
    """On to CONTROL's end."""
    async for message in bus.read(CONTROL, start=state.control_sequence + 1, follow=False):
        state.apply(decode_control(message.data), message.sequence)


async def read_outcomes(bus: Bus, state: State) -> bool:
    """On to OUTCOME's end; False where OUTCOME has lost its tail. What comes late now was late, or used, before: it isn't
    counted again.

    A state that has read further than OUTCOME goes keeps what it knows, and reads what is there from the beginning.
    """
    late = state.late
    whole = state.outcome_sequence <= (await bus.stream_state(OUTCOME)).last_sequence
    if not whole:
        _log.warning("outcome_regressed", cursor=state.outcome_sequence)
        state.outcome_sequence = state.scored_samples = state.scored_tokens = state.mixed_samples = 0
    async for message in bus.read(OUTCOME, start=state.outcome_sequence + 1, follow=False):
        if apply_outcome(state, message.data, message.sequence) == UNKNOWN_TASK:
            raise regressed(f"CONTROL ends at {state.control_sequence}, OUTCOME {message.sequence} is of a later task")
    state.late = late
    return whole


UNKNOWN_TASK = "it names a task that CONTROL hasn't"


def apply_outcome(state: State, data: bytes, sequence: int) -> str | None:
    """Take the outcome in; why not, where it can't be read."""
    try:
        outcome = decode_outcome(data)
        if outcome.task_sequence > state.control_sequence and not is_external(outcome.group):
            state.outcome_sequence = sequence
            return UNKNOWN_TASK
        state.apply_outcome(outcome, sequence)
    except MalformedError as error:
        state.outcome_sequence = sequence
        return error.message
    return None


async def _from_snapshot(bus: Bus, blobs: Blobs) -> State | None:
    """None where there is no snapshot, or none that fits the streams: they're read from their beginning then."""
    message = await bus.last(CONTROL, bus.topology.control("snapshot"))
    if message is None:
        return None
    record = decode_control(message.data)
    assert isinstance(record, SnapshotRecord)
    try:
        state = decode_state(await asyncio.to_thread(blobs.get, record.blob))
    except (MissingError, CorruptError) as error:
        _log.warning("snapshot_unreadable", control_sequence=message.sequence, reason=error.message)
        return None
    return state
