"""What a client repeats, what it doesn't, and that a repeated stream shows each token once."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from towline.client.rules import (
    Following,
    Patience,
    Piece,
    VersionNotReadyError,
    generate_body,
    headers,
    passes,
    read_answer,
    refusal,
)
from towline.contract.task import VersionSpan
from towline.errors import ConflictError, UnavailableError, UsageError

NOT_READY = {"type": "WeightVersionNotReady", "target_version": 7, "applied": 5, "message": "no"}


def fault(kind: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": "why"}}


def test_states_that_pass_are_repeated_and_refusals_are_not() -> None:
    assert passes(409, NOT_READY)
    assert passes(503, fault("EngineUnavailable"))
    assert passes(429, fault("rate_limit_error"))
    assert passes(502, None)
    for status, kind in ((400, "invalid_request_error"), (401, "x"), (403, "x"), (422, "IdempotencyKeyReused")):
        assert not passes(status, fault(kind))
    assert not passes(409, fault("IdempotencyKeyInUse"))


def test_an_answer_becomes_the_error_that_says_what_to_do() -> None:
    error = refusal(409, NOT_READY)
    assert isinstance(error, VersionNotReadyError)
    assert (error.target_version, error.applied, str(error)) == (7, 5, "no")
    assert type(refusal(503, fault("EngineUnavailable"))) is UnavailableError
    assert type(refusal(500, None)) is UnavailableError
    assert type(refusal(409, fault("IdempotencyKeyInUse"))) is ConflictError
    assert type(refusal(422, fault("IdempotencyKeyReused"))) is UsageError
    assert type(refusal(404, [1])) is UsageError


def test_a_pause_grows_honours_retry_after_and_has_an_end() -> None:
    now = [0.0]
    patience = Patience(30.0, lambda: now[0])
    first = patience.pause(None)
    assert first is not None
    assert 0 < first <= 0.2
    assert patience.pause("7") == 7.0
    pauses = [patience.pause("soon") for _ in range(10)]
    assert all(pause is not None and pause <= 5.0 for pause in pauses)
    assert pauses[-1] is not None
    assert pauses[-1] > 1.0
    now[0] = 29.5
    assert patience.pause("1") is None


def event(start: int, end: int, *, cuts: tuple[int, ...] = (), finish: str | None = None) -> str:
    """Tokens [start, end) of a sample whose token i is i, of the letter of its number; versions change at `cuts`."""
    edges = [start, *(cut for cut in cuts if start < cut < end), end]
    spans = [[a, b, sum(cut <= a for cut in cuts), "retract"] for a, b in itertools.pairwise(edges) if a < b]
    meta = {
        "output_token_logprobs": [[-float(i), i, None] for i in range(start, end)], "spans": spans,
        "finish_reason": {"type": finish} if finish else None,
    }  # fmt: skip
    text = "".join(chr(97 + i % 26) for i in range(start, end))
    return "data: " + json.dumps({"output_ids": list(range(start, end)), "text": text, "meta_info": meta})


splits = st.lists(st.integers(0, 40), max_size=6).map(lambda cuts: sorted({0, 40, *cuts}))


@given(
    lives=st.lists(st.tuples(splits, st.integers(0, 7)), max_size=4), last=splits, cuts=st.sets(st.integers(1, 39), max_size=3)
)
def test_over_repeats_that_break_anywhere_each_token_comes_once(
    lives: list[tuple[list[int], int]], last: list[int], cuts: set[int]
) -> None:
    following, pieces, versions = Following(), list[Piece](), tuple(sorted(cuts))

    def play(edges: list[int], count: int, *, whole: bool) -> None:
        for start, end in list(itertools.pairwise(edges))[:count]:
            piece = following.read(event(start, end, cuts=versions, finish="length" if end == 40 and whole else None))
            if piece is not None:
                pieces.append(piece)

    for edges, count in lives:
        play(edges, count, whole=False)
        following.again()
    play(last, len(last), whole=True)
    assert following.read("data: [DONE]") is None
    assert following.done
    assert [token for piece in pieces for token in piece.tokens] == list(range(40))
    assert [logprob for piece in pieces for logprob in piece.logprobs] == [-float(i) for i in range(40)]
    assert "".join(piece.text for piece in pieces) == "".join(chr(97 + i % 26) for i in range(40))
    spans = [span for piece in pieces for span in piece.spans]
    assert [i for span in spans for i in range(span.start, span.end)] == list(range(40))
    assert all(span.version == sum(cut <= i for cut in versions) for span in spans for i in range(span.start, span.end))
    assert [piece.finish for piece in pieces if piece.finish] == ["length"]


def test_an_error_in_a_stream_is_raised_and_other_lines_are_nothing() -> None:
    following = Following()
    assert following.read("") is None
    assert following.read(": comment") is None
    with pytest.raises(UnavailableError, match="why"):
        following.read("data: " + json.dumps(fault("EngineUnavailable")))


def test_equal_calls_give_equal_bytes_and_only_what_was_asked() -> None:
    def body(**given: Any) -> Any:
        defaults = {"sampling": None, "min_version": None, "exact_version": None, "session": None, "stream": False}
        return generate_body([1, 2], **(defaults | given))

    assert body() == body()
    assert json.loads(body()) == {"input_ids": [1, 2], "sampling_params": {}, "return_logprob": True}
    assert json.loads(body(min_version=0))["weight_version"] == {"min_version": 0}
    with pytest.raises(UsageError, match="one sample"):
        body(stream=True, sampling={"n": 2})
    assert headers("t", "k", 3.7) == {
        "Idempotency-Key": "k", "Content-Type": "application/json", "Prefer": "wait=3", "Authorization": "Bearer t",
    }  # fmt: skip
    assert "Prefer" not in headers("", "k", 0)


def test_a_superseded_sample_says_so() -> None:
    meta = {
        "id": "x", "output_token_logprobs": [[-1.0, 5, None]], "finish_reason": {"type": "abort"}, "seed": 3,
        "spans": [[0, 1, 4, "start"]], "weight_version_start": 4, "weight_version_end": 4,
    }  # fmt: skip
    (found,) = read_answer({"output_ids": [5], "meta_info": meta})
    assert (found.finish, found.text, found.spans) == ("superseded", None, [VersionSpan(0, 1, 4, "start")])
