"""A PARTIAL is what a sample's next worker goes on from: what it could not trust is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from contract import samples
from contract.test_round_trip import trajectories
from towline.contract.partial import decode_partial, encode_partial
from towline.contract.task import SamplingParams, VersionSpan, pack_tokens
from towline.contract.trajectory import Segment, Trajectory
from towline.errors import MalformedError

GOOD = encode_partial(samples.partial())


@given(trajectories())
@settings(max_examples=100, deadline=None)
def test_a_partial_comes_back_bit_for_bit(trajectory: Trajectory) -> None:
    names = ("tokens", "logprobs", "version_spans", "segments")
    partial = samples.partial(**{name: getattr(trajectory, name) for name in names}, turn=None)
    data = encode_partial(partial)
    assert samples.same(decode_partial(data), partial)
    assert encode_partial(decode_partial(data)) == data
    assert decode_partial(data).policy_tokens == trajectory.policy_tokens


def test_a_task_that_was_begun_and_has_no_token_yet_is_a_partial_too() -> None:
    nothing = samples.partial(
        tokens=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), version_spans=(), segments=(), turn=None,
        environment_state=None, starts=3,
    )  # fmt: skip
    assert samples.same(decode_partial(encode_partial(nothing)), nothing)


def test_every_truncation_is_refused() -> None:
    for length in range(len(GOOD)):
        with pytest.raises(MalformedError) as caught:
            decode_partial(GOOD[:length])
        assert caught.value.data == GOOD[:length]


def test_every_bit_flip_in_tokens_logprobs_or_state_is_refused_or_changes_none_of_them() -> None:
    reference = samples.partial()
    for position in range(len(GOOD)):
        spoiled = bytearray(GOOD)
        spoiled[position] ^= 0x10
        try:
            decoded = decode_partial(bytes(spoiled))
        except MalformedError:
            continue
        for name in ("tokens", "logprobs"):
            assert getattr(decoded, name).tobytes() == getattr(reference, name).tobytes()
        assert decoded.environment_state == reference.environment_state


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "schema 2"),
        ({"checksum": 1}, "checksum"),
        ({"starts": -1}, "starts"),
        ({"turn": "abort"}, "abort|enum"),
        ({"segments": [[0, 3, "environment"], [3, 5, "policy"], [5, 6, "tool"], [6, 7, "policy"]]}, "isn't the prompt"),
        ({"segments": [[0, 3, "prompt"], [3, 5, "policy"], [5, 7, "tool"]]}, "policy"),
        ({"version_spans": [[3, 5, 4, "start"]]}, "token 6 is uncovered"),
        ({"version_spans": [[3, 5, 4, "retract"], [6, 7, 5, "retract"]]}, "cut=start"),
    ],
)
def test_a_malformed_partial_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MalformedError, match=words):
        decode_partial(msgspec.msgpack.encode(msgspec.msgpack.decode(GOOD) | changes))


def test_an_unanswered_turn_needs_a_policy_turn_at_the_end() -> None:
    ends_with_a_tool = {
        "tokens": np.array([5, 6, 7, 8], np.int32), "logprobs": np.array([np.nan, np.nan, -1.0, np.nan], np.float32),
        "version_spans": (VersionSpan(2, 3, 4, "start"),),
        "segments": (Segment(0, 2, "prompt"), Segment(2, 3, "policy"), Segment(3, 4, "tool")),
    }  # fmt: skip
    encode_partial(samples.partial(**ends_with_a_tool, turn=None))
    with pytest.raises(MalformedError, match="turn without"):
        encode_partial(samples.partial(**ends_with_a_tool, turn="stop"))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 98}, {"sample": 2}, {"group": 8}, {"run": "other"}, {"prompt": pack_tokens([5, 6, 8])},
        {"environment": "other:Game"}, {"sampling": SamplingParams(max_tokens=4)},
    ],
)  # fmt: skip
def test_a_partial_is_of_the_task_that_asks_for_exactly_what_it_began(changes: dict[str, Any]) -> None:
    assert not samples.partial().is_of(msgspec.structs.replace(samples.TASK, **changes))
    again = msgspec.structs.replace(samples.TASK, attempt=5, not_before_depth=9, deadline=0.0)
    assert samples.partial().is_of(again), "a re-issue asks for the same"
    assert dataclasses.replace(samples.partial(), task_sequence=99).is_of(again)
