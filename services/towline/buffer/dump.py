"""The state's facts as one message, and the state from it: a snapshot's body, and what "an equal state" means.

Indexes aren't in it: they follow from the facts. Neither are the counts of outcomes that this process saw come late.
"""

from __future__ import annotations

import msgspec

from towline.buffer.groups import Batch, Group
from towline.buffer.state import State
from towline.buffer.totals import Totals
from towline.contract.codec import SCHEMA, decode, encode
from towline.contract.control import EndRecord
from towline.contract.task import Cursor, Task


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """Every fact of a `State`, in an order that the facts alone decide."""

    schema: int = SCHEMA
    control_sequence: int
    outcome_sequence: int
    writer: str
    next_group: int
    cursor: Cursor
    epoch: int
    fork_depth: int
    fork_sequence: int
    next_depth: int
    groups: tuple[Group, ...]
    batches: tuple[Batch, ...]
    admitted: int
    evaluated: int
    dropped: dict[str, int]
    evals: dict[int, tuple[int, float | None]]
    eval_groups: dict[int, int]
    newest_eval: int
    ended: EndRecord | None
    floor_depth: int = 0
    requeue: tuple[tuple[int, Task], ...] = ()
    resampled: int = 0
    unjudged: int = 0
    scored_samples: int = 0
    scored_tokens: int = 0
    mixed_samples: int = 0
    offers: tuple[Group, ...] = ()
    refused: dict[int, str] = {}
    closed_external: tuple[int, ...] = ()
    turned_away: dict[str, int] = {}
    requeued: dict[int, int] = {}
    final: Totals = msgspec.field(default_factory=Totals)
    final_sequence: int = 0


_PLAIN = (
    "control_sequence", "outcome_sequence", "writer", "next_group", "cursor", "epoch", "fork_depth", "fork_sequence",
    "next_depth", "admitted", "evaluated", "newest_eval", "ended",
    "floor_depth", "final_sequence", "resampled", "unjudged", "scored_samples", "scored_tokens", "mixed_samples",
)  # fmt: skip
_decoder = msgspec.msgpack.Decoder(Dump)


def dump(state: State) -> Dump:
    """The facts. It shares the groups with the state: encode it before the state goes on."""
    return Dump(
        **{name: getattr(state, name) for name in _PLAIN},
        dropped=dict(sorted(state.dropped.items())),
        evals=dict(sorted(state.evals.items())),
        eval_groups=dict(sorted(state.eval_groups.items())),
        requeue=tuple(state.requeue.items()),
        offers=tuple(state.offers.values()),
        refused=dict(sorted(state.refused.items())),
        closed_external=tuple(sorted(state.closed_external)),
        turned_away=dict(sorted(state.turned_away.items())),
        requeued=dict(sorted(state.requeued.items())),
        groups=tuple(state.groups[number] for number in sorted(state.groups)),
        batches=tuple(state.batches[depth] for depth in sorted(state.batches)),
        final=state.final.copy(),
    )


def load(facts: Dump) -> State:
    """A state with these facts, its indexes built anew. It takes the groups over."""
    state = State()
    for name in _PLAIN:
        setattr(state, name, getattr(facts, name))
    state.dropped, state.evals, state.eval_groups = dict(facts.dropped), dict(facts.evals), dict(facts.eval_groups)
    state.requeue = dict(facts.requeue)
    for offer in facts.offers:
        state.offers[offer.number] = offer
        for index, sample in enumerate(offer.samples):
            if sample is not None:
                state.note_offer(offer, index)
    state.refused, state.turned_away, state.requeued = dict(facts.refused), dict(facts.turned_away), dict(facts.requeued)
    state.closed_external = dict.fromkeys(facts.closed_external)
    state.final = facts.final.copy()
    for batch in facts.batches:
        if batch.for_depth < facts.floor_depth:  # a snapshot of an older release, which kept them one by one
            state.finish(batch)
        else:
            state.batches[batch.for_depth] = batch
    state.totals = state.counted()
    for group in facts.groups:
        state.groups[group.number] = group
        if group.batch is None:
            state.enter(group)
    return state


def encode_state(state: State) -> bytes:
    """The snapshot of the state."""
    return encode(dump(state))


def decode_state(data: bytes) -> State:
    """The state of a snapshot; `MalformedError` where the bytes aren't one."""
    return load(decode(_decoder, data, "buffer snapshot"))
