"""Trajectories that reward has acknowledged and not scored: where its verifier compares a group's samples, all but the last one.

They stand in TRAJECTORY until the last one comes, which may be long after, and then all are read from there and scored. The
state knows nothing of them, so what may be purged has to be looked up in the stream.
"""

from __future__ import annotations

import contextlib
import time

from towline.buffer.state import State
from towline.bus.client import Bus
from towline.bus.read import Unfetched
from towline.bus.topology import TRAJECTORY
from towline.contract.groups import is_external, parse_group


async def first_unscored(bus: Bus, state: State, first: int, below: int, patience_seconds: float) -> int:
    """The first sequence in [first, below) of TRAJECTORY whose sample may still be scored; `below` where there is none.

    Nobody may ever send the rest of an external group: what of it is older than `patience_seconds` isn't waited for.
    """
    before = time.time() - patience_seconds
    reader = Unfetched(bus.jetstream, bus.topology.stream(TRAJECTORY), None, start=first, follow=False, headers_only=True)
    async with contextlib.aclosing(reader.messages()) as messages:
        async for message in messages:
            if message.sequence >= below:
                break
            if may_be_scored(state, message.subject, patient=message.at >= before):
                return message.sequence
    return below


def may_be_scored(state: State, subject: str, *, patient: bool = True) -> bool:
    """Whether the sample that this subject of TRAJECTORY names has no score and may get one. `patient`: also one of an external
    group that nothing is known of yet."""
    token, _, sample = subject.rpartition(".")
    number = parse_group(token.rpartition(".")[2])
    if number is None or not sample.isdecimal():
        return False
    group = state.groups.get(number) or state.offers.get(number)
    if group is None and is_external(number):
        return patient and number not in state.closed_external
    if group is None:
        return number >= state.next_group
    if group.packed is not None or int(sample) >= group.size:
        return False  # a batched group has all its scores
    found = group.samples[int(sample)]
    return found is None or found.scored is None
