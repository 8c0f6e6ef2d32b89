"""A session as it is kept: everything but the tokenizer, in one message that a gateway anywhere can take over.

MessagePack with a schema number, as all of Towline's messages (contract/SCHEMA.md); tokens and logprobs are packed arrays.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import msgspec
import numpy as np

from towline.contract.arrays import Array, pack, unpack
from towline.contract.codec import SCHEMA, decode, encode
from towline.contract.task import VersionSpan, pack_tokens
from towline.errors import MalformedError
from towline.session.boundary import Boundary
from towline.session.tree import ROOT, Limits, Node, Session


class NodeRecord(msgspec.Struct, frozen=True, array_like=True):
    parent: int
    kind: Literal["prompt", "policy", "environment", "tool"]
    tokens: Array
    messages: tuple[dict[str, Any], ...]
    logprobs: Array
    spans: tuple[VersionSpan, ...]
    finish: Literal["stop", "length", ""]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`family`: of the boundary that wrote it; another one's turns would not fit."""

    schema: int = SCHEMA
    family: str
    head: int
    tools: str
    nodes: tuple[NodeRecord, ...]
    mismatches: dict[str, int] = {}


_decoder = msgspec.msgpack.Decoder(SessionRecord)


def encode_session(session: Session) -> bytes:
    nodes = tuple(
        NodeRecord(
            node.parent,
            node.kind,
            pack_tokens(node.tokens),
            node.messages,
            pack(np.asarray(node.logprobs, np.float32), "<f4"),
            node.spans,
            node.finish,
        )
        for node in session.nodes
    )
    return encode(
        SessionRecord(
            family=session.boundary.family,
            head=session.head,
            tools=session.tools,
            nodes=nodes,
            mismatches=dict(session.mismatches),
        )
    )


def decode_session(data: bytes, boundary: Boundary, limits: Limits | None = None) -> Session:
    """The session; `MalformedError` where the bytes aren't one that `boundary` could have written."""
    record = decode(_decoder, data, "session")
    if record.family != boundary.family:
        raise MalformedError(f"session: kept by the rules of {record.family}, not {boundary.family}", code="session", data=data)
    nodes = [_node(number, found, data) for number, found in enumerate(record.nodes)]
    if not ROOT <= record.head < len(nodes):
        raise MalformedError(f"session: its head {record.head} isn't one of {len(nodes)} nodes", code="session", data=data)
    return Session(boundary, limits or Limits(), nodes, record.head, record.tools, Counter(record.mismatches))


def _node(number: int, record: NodeRecord, data: bytes) -> Node:
    tokens = tuple(int(token) for token in unpack(record.tokens, "<i4", "tokens"))
    logprobs = tuple(float(value) for value in unpack(record.logprobs, "<f4", "logprobs"))
    policy = record.kind == "policy"
    covered = sum(span.end - span.start for span in record.spans)
    sound = ROOT <= record.parent < number and len(logprobs) == covered == (len(tokens) if policy else 0)
    if not sound or (record.parent == ROOT) != (record.kind == "prompt"):
        raise MalformedError(f"session: node {number} contradicts itself", code="session", data=data)
    return Node(record.parent, record.kind, tokens, record.messages, logprobs, record.spans, record.finish)
