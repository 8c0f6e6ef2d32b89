"""What is repeated, how long is waited, where a stream goes on: the decisions alone, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

import pytest

from towline.client.operations import Ask, Lost, Operations, Reply
from towline.client.rules import VersionNotReadyError
from towline.client.steps import Next, Send, Show, Wait, lost
from towline.errors import ConflictError, UnavailableError, UsageError

SAMPLE = {
    "output_ids": [1], "text": "a",
    "meta_info": {
        "id": "gen-1", "finish_reason": {"type": "stop", "matched": 1}, "output_token_logprobs": [[-0.5, 1, None]],
        "spans": [[0, 1, 3, "start"]], "seed": 5, "weight_version_start": 3, "weight_version_end": 3,
    },
}  # fmt: skip


def reply(status: int, tree: Any = None, retry_after: str | None = None) -> Reply:
    return Reply(status, retry_after, b"" if tree is None else json.dumps(tree).encode())


def fault(status: int, kind: str, retry_after: str | None = None) -> Reply:
    return reply(status, {"error": {"type": kind, "message": "why"}}, retry_after)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(
    steps: Generator[Any, Any, Any], clock: Clock, answer: Callable[[Any], Any]
) -> tuple[Any, list[Ask], list[float], list[Any]]:
    """Its result, what it sent, what it waited and what it showed. Waiting moves the clock."""
    sent, waits, shown = list[Ask](), list[float](), list[Any]()
    told: Any = None
    while True:
        try:
            step = steps.send(told)
        except StopIteration as end:
            return end.value, sent, waits, shown
        told = None
        match step:
            case Wait(seconds):
                clock.now += seconds
                waits.append(seconds)
            case Show(piece):
                shown.append(piece)
            case Send(ask):
                sent.append(ask)
                told = answer(ask)
            case Next():
                told = answer(None)


def operations(patience_seconds: float = 30.0) -> tuple[Operations, Clock]:
    clock = Clock()
    return Operations("secret", patience_seconds, "run", clock), clock


def test_what_passes_is_sent_again_under_the_same_key_after_what_the_gateway_asks_for() -> None:
    calls, clock = operations()
    not_ready = reply(409, {"type": "WeightVersionNotReady", "message": "no", "target_version": 3, "applied": 2}, "2")
    said = iter(
        [
            Lost(lost("reset")),
            fault(503, "EngineUnavailable", "3"),
            not_ready,
            fault(429, "rate_limit_error", "1"),
            reply(200, SAMPLE),
        ]
    )
    (sample,), sent, waits, _ = play(calls.generate([1], min_version=3), clock, lambda ask: next(said))
    assert sample.tokens == [1]
    assert len(sent) == 5
    assert len({one.headers["Idempotency-Key"] for one in sent}) == 1
    assert all(one == sent[0] for one in sent)
    assert sent[0].headers["Authorization"] == "Bearer secret"
    assert waits[0] < 1
    assert waits[1:3] == [3, 2]
    assert waits[3] >= 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (fault(400, "invalid_request_error"), UsageError), (fault(401, "authentication_error"), UsageError),
        (fault(409, "IdempotencyKeyInUse"), ConflictError), (fault(409, "SessionConflict"), ConflictError),
        (fault(422, "IdempotencyKeyReused"), UsageError), (reply(404), UsageError),
    ],
)  # fmt: skip
def test_what_no_repeat_would_change_is_raised_at_once(answer: Reply, error: type[Exception]) -> None:
    calls, clock = operations()
    sent = []

    def once(ask: Ask) -> Reply:
        sent.append(ask)
        return answer

    with pytest.raises(error):
        play(calls.turn("sess-1", [{"role": "user", "content": "a"}]), clock, once)
    assert len(sent) == 1


def test_the_patience_has_an_end_and_the_last_reason_is_told() -> None:
    calls, clock = operations(10.0)
    not_ready = reply(409, {"type": "WeightVersionNotReady", "message": "no", "target_version": 3, "applied": 2}, "4")
    with pytest.raises(VersionNotReadyError) as refused:
        play(calls.generate([1], min_version=3), clock, lambda ask: not_ready)
    assert refused.value.target_version == 3
    assert clock.now <= 10.0


def test_a_rollback_is_repeated_only_where_the_gateway_cannot_have_seen_it() -> None:
    calls, clock = operations()
    said = iter([Lost(lost("refused"), sent=False), fault(503, "EngineUnavailable"), Lost(lost("reset"))])
    with pytest.raises(UnavailableError, match="reset"):
        play(calls.rollback("sess-1"), clock, lambda ask: next(said))
    assert next(said, "none left") == "none left"


def test_a_claim_without_a_task_is_none_and_a_deleted_session_may_be_gone_already() -> None:
    calls, clock = operations()
    found, sent, _, _ = play(calls.claim(environment="e", min_version=2, wait_seconds=5), clock, lambda ask: reply(204))
    assert found is None
    assert (sent[0].path, sent[0].headers["Prefer"]) == ("/tasks/claim", "wait=5")
    assert json.loads(sent[0].body or b"") == {"environment": "e", "weight_version": {"min_version": 2}}
    said = iter([Lost(lost("reset")), fault(404, "session_not_found")])
    assert play(calls.delete_session("sess-1"), clock, lambda ask: next(said))[0] is None


def test_a_version_is_waited_for_by_the_gateway_s_word_not_by_its_number() -> None:
    calls, clock = operations(60.0)
    infos = iter(
        {"run": "r", "latest_version": 9, "depth": 4, "applied": at, "versions": {str(at): 1}, "met": met}
        for at, met in ((8, False), (7, False), (9, True))
    )
    found, sent, waits, _ = play(calls.wait_for_version(min_version=7), clock, lambda ask: reply(200, next(infos)))
    assert (found.applied, found.serving) == (9, {9: 1})
    assert [one.path for one in sent] == ["/server_info?version=7"] * 3
    assert len(waits) == 2
    info = {"run": "r", "latest_version": 9, "depth": 4, "applied": 9, "versions": {"9": 1}, "met": True}
    with pytest.raises(VersionNotReadyError):
        play(calls.wait_for_version(exact_version=7, seconds=2), clock, lambda ask: reply(200, info))
    for both in ({}, {"min_version": 1, "exact_version": 1}):
        with pytest.raises(UsageError):
            play(calls.wait_for_version(**both), clock, lambda ask: reply(200, info))


def line(tokens: list[int], at: int, finish: str | None = None) -> str:
    meta = SAMPLE["meta_info"] | {  # type: ignore[operator]
        "finish_reason": finish and {"type": finish}, "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "spans": [[at, at + len(tokens), 3, "start"]],
    }  # fmt: skip
    return "data: " + json.dumps({"output_ids": tokens, "text": "".join(map(str, tokens)), "meta_info": meta})


def test_a_stream_that_breaks_shows_each_token_once_and_its_patience_begins_anew() -> None:
    calls, clock = operations(10.0)
    first = [
        line([1, 2], 0),
        None,
        Lost(lost("reset")),
        line([1], 0),
        line([2, 3], 1),
        'data: {"error": {"type": "x", "message": "y"}}',
    ]
    said = iter([*first, fault(503, "EngineUnavailable", "8"), line([1, 2, 3, 4], 0, "stop"), "data: [DONE]"])
    _, sent, _, shown = play(calls.stream([1]), clock, lambda ask: next(said))
    assert [token for piece in shown for token in piece.tokens] == [1, 2, 3, 4]
    assert "".join(piece.text for piece in shown) == "1234"
    assert [piece.finish for piece in shown] == [None, None, "stop"]
    assert [(span.start, span.end) for piece in shown for span in piece.spans] == [(0, 2), (2, 3), (3, 4)]
    assert len({one.headers["Idempotency-Key"] for one in sent}) == 1
    assert len(sent) == 5
    with pytest.raises(UnavailableError, match="ended early"):
        play(calls.stream([1]), clock, lambda ask: None)
