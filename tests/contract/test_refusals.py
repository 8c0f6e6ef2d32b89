"""Whatever a reader couldn't trust is refused, and the error says which field, and keeps the message."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import zstandard

from contract import samples
from towline.contract import codec
from towline.contract.arrays import MAX_ELEMENTS
from towline.contract.codec import encode
from towline.contract.control import decode_control
from towline.contract.entries import MAX_ENTRY_BYTES, QuarantineEntry, decode_entry, encode_entry
from towline.contract.outcome import decode_outcome
from towline.contract.task import VersionSpan
from towline.contract.trajectory import Segment, decode_trajectory, encode_trajectory
from towline.errors import CorruptError, InvariantError, MalformedError

GOOD = encode_trajectory(samples.trajectory())


def refuse(data: bytes) -> MalformedError:
    with pytest.raises(MalformedError) as caught:
        decode_trajectory(data)
    assert caught.value.data == data
    return caught.value


def test_every_truncation_is_refused() -> None:
    for length in range(len(GOOD)):
        refuse(GOOD[:length])


def test_every_bit_flip_in_the_arrays_is_refused_or_changes_no_array() -> None:
    reference = samples.trajectory()
    for position in range(len(GOOD)):
        spoiled = bytearray(GOOD)
        spoiled[position] ^= 0x10
        try:
            decoded = decode_trajectory(bytes(spoiled))
        except MalformedError:
            continue
        for name in ("tokens", "loss_mask", "logprobs"):
            assert getattr(decoded, name).tobytes() == getattr(reference, name).tobytes()


DEEP = b"\x91" * 5000 + b"\xc0"
"""Arrays in arrays: 5 kB that no reader can follow to their end."""


@pytest.mark.parametrize("decode", [decode_trajectory, decode_outcome, decode_control])
@pytest.mark.parametrize("field", ["reference", "a_field_of_tomorrow"])
def test_a_message_that_is_nested_too_deeply_is_refused_like_any_other(decode: Any, field: str) -> None:
    name = field.encode()
    data = b"\x82\xa6schema\x01" + bytes([0xA0 | len(name)]) + name + DEEP
    with pytest.raises(MalformedError) as caught:
        decode(data)
    assert caught.value.data == data


def test_a_log_entry_that_is_nested_too_deeply_is_refused_like_any_other() -> None:
    with pytest.raises(CorruptError):
        decode_entry(b'{"schema": 1, "a_field_of_tomorrow": ' + b"[" * 5000 + b"]" * 5000 + b"}", 3)


def with_array(name: str, **changes: Any) -> bytes:
    tree = samples.wire(GOOD)
    array = dict(zip(("dtype", "count", "encoding", "data"), tree[name], strict=True)) | changes
    tree[name] = list(array.values())
    return samples.repack(tree)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (with_array("tokens", dtype="<f4"), "tokens: dtype"),
        (with_array("tokens", dtype="<i8"), r"<i8.*tokens"),
        (with_array("tokens", count=8), "tokens: 28 bytes where 8 x 4"),
        (with_array("tokens", count=MAX_ELEMENTS + 1), "elements"),
        (with_array("tokens", count=-1), "elements"),
        (with_array("tokens", encoding="planes"), "tokens"),
        (with_array("tokens", encoding="gzip"), "encoding|gzip|enum"),
        (with_array("loss_mask", data=b"\0\0\0\1\1\0", count=6), "loss_mask has 6"),
        (with_array("logprobs", data=np.zeros(7, "<f4").tobytes()), "logprob"),
        (samples.repack(samples.wire(GOOD) | {"schema": 2}), "schema 2"),
        (samples.repack(samples.wire(GOOD) | {"checksum": 1}), "checksum"),
        (samples.repack(samples.wire(GOOD) | {"version_end": 9}), "version_end"),
        (samples.repack(samples.wire(GOOD) | {"finish": "abort"}), "abort|enum"),
        (samples.repack(samples.wire(GOOD) | {"logprob_kind": "raw"}), "raw|enum"),
        (samples.repack({k: v for k, v in samples.wire(GOOD).items() if k != "seed"}), "seed"),
        (b"\x93\x01\x02\x03", "trajectory"),
        (b"", "trajectory"),
    ],
)
def test_a_malformed_trajectory_is_refused_by_name(data: bytes, words: str) -> None:

    assert re.search(words, refuse(data).message)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprobs": np.array([np.nan] * 3 + [np.nan, -1, np.nan, -2], np.float32)}, "policy token 3 isn't finite"),
        ({"logprobs": np.array([np.nan] * 3 + [np.inf, -1, np.nan, -2], np.float32)}, "policy token 3 isn't finite"),
        ({"logprobs": np.array([np.nan] * 3 + [0.5, -1, np.nan, -2], np.float32)}, "positive"),
        ({"logprobs": np.array([0.0] * 3 + [-1, -1, 0, -2], np.float32)}, "didn't choose"),
        ({"tokens": np.array([5, 6, 7, 8, 9, 10, -2], np.int32)}, "negative"),
        ({"loss_mask": np.array([0, 0, 0, 1, 1, 0, 2], np.uint8)}, "loss_mask"),
        ({"loss_mask": np.zeros(7, np.uint8), "logprobs": np.full(7, np.nan, np.float32)}, "no token was chosen"),
        ({"version_spans": (VersionSpan(3, 5, 4, "start"),)}, "token 6 is uncovered"),
        ({"version_spans": (VersionSpan(3, 7, 4, "start"),)}, "token 5 is wrongly covered"),
        ({"version_spans": (VersionSpan(3, 5, 4, "start"), VersionSpan(4, 7, 5, "retract"))}, "out of order"),
        ({"version_spans": (VersionSpan(3, 5, 4, "start"), VersionSpan(6, 8, 5, "retract"))}, "out of range"),
        ({"version_spans": (VersionSpan(3, 5, 4, "retract"), VersionSpan(6, 7, 5, "retract"))}, "cut=start"),
        ({"segments": (Segment(0, 3, "prompt"), Segment(3, 7, "policy"))}, "policy segments"),
        ({"segments": (Segment(0, 3, "prompt"), Segment(3, 5, "policy"))}, "segments: token 5"),
    ],
)
def test_an_untrustworthy_trajectory_is_refused_on_both_sides(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MalformedError, match=words):
        encode_trajectory(samples.trajectory(**changes))


def test_a_compressed_array_can_t_claim_more_than_it_declares() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(50 << 20))
    refuse(with_array("tokens", encoding="planes", data=bomb))


def test_an_over_size_message_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", len(GOOD) - 1)
    assert "more than" in refuse(GOOD).message


@pytest.mark.parametrize("decode", [decode_control, decode_outcome])
def test_an_unknown_kind_is_refused(decode: Any) -> None:
    with pytest.raises(MalformedError, match=r"kind|pact"):
        decode(samples.repack({"schema": 1, "kind": "pact", "writer": "w"}))


def test_unknown_fields_of_the_same_schema_are_ignored() -> None:
    tree = samples.wire(GOOD) | {"colour": "red"}
    assert samples.same(decode_trajectory(samples.repack(tree)), samples.trajectory())
    record = samples.CONTROL["drop"]
    assert decode_control(samples.repack(samples.wire(encode(record)) | {"colour": "red"})) == record


def test_a_log_entry_at_another_number_is_corrupt() -> None:
    data = encode_entry(samples.ENTRIES["open"])
    with pytest.raises(CorruptError, match="number 1"):
        decode_entry(data, 2)
    with pytest.raises(CorruptError, match="log entry 1"):
        decode_entry(data[:-1], 1)


def test_a_log_entry_stays_under_its_limit() -> None:
    with pytest.raises(InvariantError, match="bytes"):
        encode_entry(QuarantineEntry(number=3, prev="a", write_id="w", at=0.0, version=2, reason="x" * MAX_ENTRY_BYTES))
