"""What a stream's answers become, without a server: the shapes that SGLang's answers were seen to take."""

from __future__ import annotations

from typing import Any

import pytest

from support.sglang_requests import request
from towline.contract.task import VersionSpan
from towline.engine.base import Progress
from towline.engine.sglang.stream import Label, Run, Stream
from towline.errors import EngineError

LABELS = {"0-0": Label(0, "start"), "1-1": Label(1, "retract"), "1-2": Label(1, "retract"), "2-3": Label(2, "in_place")}


def answer(start: int, end: int, *spans: tuple[str, int], first: int = 100) -> dict[str, Any]:
    """An answer with the tokens start..end of a stream whose token i is `first` + i; its spans end where they say."""
    rows = [[-float(i), first + i, None] for i in range(start, end)]
    meta: dict[str, Any] = {"completion_tokens": end, "output_token_logprobs": rows}
    if spans:
        at, meta["weight_versions"] = 0, []
        for version, until in spans:
            meta["weight_versions"].append({"version": version, "start": at, "end": until})
            at = until
    return {"output_ids": [row[1] for row in rows], "meta_info": meta}


def run_of(limit: int = 100, told: list[Progress] | None = None, every: int = 10, **sampling: Any) -> Run:
    on_progress = None if told is None else told.append
    return Run(request("r", [1, 2], limit, on_progress=on_progress, every=every, **sampling), limit, LABELS)


def test_answers_join_however_much_of_the_former_ones_they_repeat() -> None:
    stream = Stream("r/1", "0-0")
    stream.feed(answer(0, 1, ("0-0", 1)), unchanged=True)
    stream.feed(answer(1, 17, ("0-0", 17)), unchanged=True)
    stream.feed(answer(0, 20, ("0-0", 20)), unchanged=True)
    assert stream.tokens == [100 + i for i in range(20)]
    assert stream.logprobs == [-float(i) for i in range(20)]
    # An abort's answer joined with one before it: the last `completion_tokens` rows are the whole.
    joined = answer(0, 24, ("0-0", 24))
    joined["meta_info"]["output_token_logprobs"] = (
        answer(20, 24)["meta_info"]["output_token_logprobs"] + joined["meta_info"]["output_token_logprobs"]
    )
    stream.feed(joined, unchanged=True)
    assert stream.tokens == [100 + i for i in range(24)]
    assert stream.certain == 24


def test_an_aborts_answer_that_holds_less_takes_nothing_back() -> None:
    stream = Stream("r/1", "0-0")
    stream.feed(answer(0, 20, ("0-0", 12), ("1-1", 20)), unchanged=False)
    stream.feed(answer(0, 15, ("0-0", 12), ("1-1", 15)), unchanged=False)
    stream.feed({"output_ids": [], "meta_info": {}}, unchanged=False)
    assert len(stream.tokens) == 20
    assert stream.spans == [("0-0", 12), ("1-1", 20)]


def test_without_spans_only_what_came_before_a_change_counts() -> None:
    run = run_of()
    stream = run.begin("0-0")
    stream.feed(answer(0, 16), unchanged=True)
    stream.feed(answer(16, 48), unchanged=False)
    run.end_stream()
    assert run.tokens == [100 + i for i in range(16)]
    assert run.spans == [VersionSpan(0, 16, 0, "start")]
    # It goes on from there, and the spans of one version are one.
    assert run.finished("lost", again=False) is None
    assert run.begin("1-1").rid == "r/2"
    assert run.body(seeded=False)["input_ids"] == [1, 2, *run.tokens]
    assert run.stream is not None
    run.stream.feed(answer(0, 30, ("1-1", 30), first=200), unchanged=True)
    run.end_stream()
    stream = run.begin("1-2")
    stream.feed(answer(0, 54, ("1-2", 10), ("2-3", 54), first=300), unchanged=False)
    run.end_stream()
    assert run.spans == [
        VersionSpan(0, 16, 0, "start"), VersionSpan(16, 56, 1, "retract"), VersionSpan(56, 100, 2, "in_place"),
    ]  # fmt: skip
    assert run.finished("length", again=False) == "length"
    assert len(run.generation("length").tokens) == len(run.logprobs) == 100


def test_progress_is_told_once_for_every_so_many_tokens_and_never_changes() -> None:
    told: list[Progress] = []
    run = run_of(told=told)
    stream = run.begin("0-0")
    for start, end in ((0, 9), (9, 12), (12, 21), (21, 40)):
        stream.feed(answer(start, end, ("0-0", min(end, 15)), *([("1-1", end)] if end > 15 else [])), unchanged=True)
        run.tell()
    assert [len(progress.tokens) for progress in told] == [12, 40]
    assert told[0].spans == [VersionSpan(0, 12, 0, "start")]
    assert told[1].spans == [VersionSpan(0, 15, 0, "start"), VersionSpan(15, 40, 1, "retract")]
    run.end_stream()
    run.begin("1-2").feed(answer(0, 9, ("1-2", 9), first=200), unchanged=True)
    run.tell()
    assert len(told) == 2
    assert run.stream is not None
    run.stream.feed(answer(9, 10, ("1-2", 10), first=200), unchanged=True)
    run.tell()
    assert told[2].tokens == [*told[1].tokens, *range(200, 210)]


def test_a_stream_that_is_begun_again_brings_nothing() -> None:
    run = run_of()
    stream = run.begin("0-0")
    stream.again = True
    stream.feed(answer(0, 5, ("2-3", 5)), unchanged=False)
    run.end_stream()
    assert run.tokens == []
    assert run.finished("abort: ", again=True) is None


def test_how_a_stream_ends_the_request() -> None:
    run = run_of(limit=5, stop_token_ids=(104,))
    run.begin("0-0").feed(answer(0, 3, ("0-0", 3)), unchanged=True)
    run.end_stream()
    assert run.finished("stop", again=False) is None, "the model's own end of sequence isn't the request's"
    with pytest.raises(EngineError, match="after 3 tokens of 5: abort: out of memory"):
        run.finished("abort: out of memory", again=False)
    run.aborted.set()
    assert run.finished("abort: ", again=False) == "abort"
    run.begin("0-0").feed(answer(0, 2, ("0-0", 2), first=103), unchanged=True)
    run.end_stream()
    assert run.finished("stop", again=False) == "stop"


@pytest.mark.parametrize("spans", [[("0-0", 4)], [("0-0", 6)], [("0-0", 3), ("1-1", 2), ("0-0", 5)], []])
def test_spans_that_dont_divide_the_tokens_are_refused(spans: list[tuple[str, int]]) -> None:
    wrong = answer(0, 5, *spans)
    wrong["meta_info"].setdefault("weight_versions", [])
    with pytest.raises(EngineError, match="don't divide its 5 tokens"):
        Stream("r/1", "0-0").feed(wrong, unchanged=True)


def test_a_gap_and_an_unknown_label_are_refused() -> None:
    stream = Stream("r/1", "0-0")
    stream.feed(answer(0, 4, ("0-0", 4)), unchanged=True)
    with pytest.raises(EngineError, match="of which 4 had come"):
        stream.feed(answer(6, 9, ("0-0", 9)), unchanged=True)
    run = run_of()
    run.begin("0-0").feed(answer(0, 4, ("7-9", 4)), unchanged=True)
    with pytest.raises(EngineError, match="'7-9', which nobody loaded"):
        run.end_stream()
