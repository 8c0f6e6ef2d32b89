"""What a person asks of the buffer: to admit the prompt of a group again that was dropped over a dead letter.

A request is create-only, at dead.requeue.SEQUENCE of the dead letter it names, so asking twice is asking once. It only points:
the buffer reads what it points to, and what it then decides is a `requeue` record in CONTROL.
"""

from __future__ import annotations

import msgspec

from towline.contract.codec import SCHEMA, decode

STAGE = "requeue"
"""The first word of a request's subject after `dead.`; no dead letter has this stage."""


class RequeueRequest(msgspec.Struct, frozen=True, kw_only=True, tag="requeue_request", tag_field="kind"):
    """The prompt of the group whose task stands at `task_sequence` of CONTROL, and whose drop stands at `drop_sequence`."""

    schema: int = SCHEMA
    run: str
    dead: int
    """The dead letter's sequence in DEAD."""
    task_sequence: int
    drop_sequence: int


_decoder = msgspec.msgpack.Decoder(RequeueRequest)


def request_stage(dead: int) -> str:
    """`topology.dead` of it is the request's subject."""
    return f"{STAGE}.{dead}"


def decode_request(data: bytes) -> RequeueRequest:
    """A request; `MalformedError` otherwise."""
    return decode(_decoder, data, "requeue request")
