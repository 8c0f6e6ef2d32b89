"""What a gateway and a replica's door say to each other: one request, then numbered chunks of its answer, or a refusal.

These messages are never stored. docs/design/060-gateway.md says what binds a request to a version.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from towline.contract.arrays import Array, pack, unpack
from towline.contract.codec import SCHEMA, decode
from towline.contract.task import SamplingParams, VersionSpan

ServeFinish = Literal["stop", "length", "superseded", "handed_over", "cancelled", "failed"]
"""`superseded`: the replica left the versions that the request accepts. `handed_over`, `failed`: the replica stops, or can't go
on. After each of these three another replica may go on from what came."""
RefusalCode = Literal["not_ready", "busy", "draining", "invalid"]


class ServeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Go on from `tokens`, with a version that both bounds accept (at most one is given)."""

    schema: int = SCHEMA
    id: str
    tokens: Array
    """int32[P]: the prompt, and the policy tokens that stand already."""
    sampling: SamplingParams
    """`max_tokens` bounds the policy tokens in all."""
    seed: int
    position0: int = 0
    """Policy tokens at the end of `tokens`: token i of the answer is the sample's token position0 + i."""
    min_version: int | None = None
    exact_version: int | None = None
    chunk_tokens: int = 16
    """About so many tokens a chunk."""

    @property
    def prompt(self) -> list[int]:
        return [int(token) for token in unpack(self.tokens, "<i4", "tokens")]


class ServeChunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk", tag_field="kind"):
    """Chunk `number` (0, 1, … without a gap). The first, without tokens, says that the request was taken; one that repeats the
    last number says only that the replica is alive."""

    schema: int = SCHEMA
    id: str
    number: int
    tokens: Array | None = None
    """int32[n]; None: none."""
    logprobs: Array | None = None
    """float32[n]."""
    spans: tuple[VersionSpan, ...] = ()
    """Of these tokens; start and end count the answer's tokens from its first one."""
    busy: int = 0
    """The replica's slots in use, and requests that wait for one."""
    finish: ServeFinish | None = None
    """Set in the last chunk."""
    applied: int | None = None
    """The version that the replica advertises."""
    reason: str = ""

    def content(self) -> tuple[list[int], list[float]]:
        """Tokens and logprobs. `MalformedError` where they aren't arrays of one length."""
        if self.tokens is None or self.logprobs is None:
            return [], []
        return unpack(self.tokens, "<i4", "tokens").tolist(), unpack(self.logprobs, "<f4", "logprobs").tolist()


class ServeRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal", tag_field="kind"):
    """The door doesn't take the request: another replica may, except where it is `invalid`."""

    schema: int = SCHEMA
    id: str
    code: RefusalCode
    applied: int | None
    message: str


class ServeCancel(msgspec.Struct, frozen=True, kw_only=True):
    """Nobody waits for the request's answer any more."""

    schema: int = SCHEMA
    id: str


ServeAnswer = ServeChunk | ServeRefusal
_request = msgspec.msgpack.Decoder(ServeRequest)
_answer: msgspec.msgpack.Decoder[ServeAnswer] = msgspec.msgpack.Decoder(ServeAnswer)
_cancel = msgspec.msgpack.Decoder(ServeCancel)


def decode_request(data: bytes) -> ServeRequest:
    return decode(_request, data, "serve request")


def decode_answer(data: bytes) -> ServeAnswer:
    return decode(_answer, data, "serve answer")


def decode_cancel(data: bytes) -> ServeCancel:
    return decode(_cancel, data, "serve cancel")


def pack_logprobs(logprobs: list[float]) -> Array:
    """As float32, which is what engines compute."""
    return pack(np.array(logprobs, np.float32), "<f4")


def clip_spans(spans: list[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """What the spans say of tokens [start, end)."""
    return tuple(
        VersionSpan(max(span.start, start), min(span.end, end), span.version, span.cut)
        for span in spans
        if max(span.start, start) < min(span.end, end)
    )
