"""Serving messages: what goes in comes out, and what no door or gateway may act on is refused by name."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.contract.codec import encode
from towline.contract.serve import (
    ServeCancel,
    ServeChunk,
    ServeRefusal,
    ServeRequest,
    clip_spans,
    decode_answer,
    decode_cancel,
    decode_request,
    pack_logprobs,
)
from towline.contract.task import SamplingParams, VersionSpan, pack_tokens
from towline.errors import MalformedError

REQUEST = ServeRequest(
    id="r", tokens=pack_tokens([1, 2, 3]), sampling=SamplingParams(max_tokens=9, stop_token_ids=(2,)), seed=-5, min_version=4
)
CHUNK = ServeChunk(
    id="r", number=3, tokens=pack_tokens([7, 8]), logprobs=pack_logprobs([-0.5, -1.25]), applied=4, finish="length",
    spans=(VersionSpan(4, 6, 4, "retract"),),
)  # fmt: skip
REFUSAL = ServeRefusal(id="r", code="busy", applied=None, message="full")


def test_messages_come_back_as_they_went() -> None:
    assert decode_request(encode(REQUEST)) == REQUEST
    assert REQUEST.prompt == [1, 2, 3]
    assert decode_answer(encode(CHUNK)) == CHUNK
    assert CHUNK.content() == ([7, 8], [-0.5, -1.25])
    assert ServeChunk(id="r", number=0).content() == ([], [])
    assert decode_answer(encode(REFUSAL)) == REFUSAL
    assert decode_cancel(encode(ServeCancel(id="r"))) == ServeCancel(id="r")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema 2"),
        ({"id": 5}, "id"),
        ({"seed": "x"}, "seed"),
        ({"sampling": {}}, "max_tokens"),
        ({"tokens": ["<i4", 9, "raw", b"1234"]}, "9 x 4 are declared"),
        ({"tokens": ["<f4", 1, "raw", b"1234"]}, "dtype"),
        ({"tokens": ["<i4", 1 << 40, "planes", b""]}, "elements"),
    ],
)
def test_a_request_that_isn_t_one_is_refused(change: dict[str, object], says: str) -> None:
    tree = msgpack.unpackb(encode(REQUEST)) | change
    with pytest.raises(MalformedError, match=says):
        decode_request(msgpack.packb(tree)).prompt  # noqa: B018


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_a_message(data: bytes) -> None:
    for decoder in (decode_request, decode_answer, decode_cancel):
        with pytest.raises(MalformedError):
            decoder(data)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_clipped_spans_are_those_of_the_tokens_in_between(lengths: list[int], data: st.DataObject) -> None:
    spans, at = [], 0
    for version, length in enumerate(lengths):
        spans.append(VersionSpan(at, at + length, version, "retract" if version else "start"))
        at += length
    start = data.draw(st.integers(0, at))
    end = data.draw(st.integers(start, at))
    of = [span.version for span in spans for _ in range(span.end - span.start)]
    clipped = clip_spans(spans, start, end)
    assert [span.version for span in clipped for _ in range(span.start, span.end)] == of[start:end]
    assert all(span.start < span.end for span in clipped)
