"""The buffer's records as spans: what hangs below what, what is linked, and that an append which fails says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from towline import spans
from towline.buffer.records import Chunk
from towline.buffer.traces import Appending, Traces
from towline.bus.client import Message
from towline.contract.control import (
    AdmitRecord,
    BatchRecord,
    BatchRow,
    DropRecord,
    EvalRecord,
    EvalRow,
    Record,
    ReissueRecord,
    SnapshotRecord,
    TaskRecord,
)
from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.spans import Context, Kind


@dataclass
class Seen(spans._Nothing):
    """A span that remembers."""

    name: str
    parent: Context | None
    own: Context | None
    links: list[Context]
    at: float | None
    told: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    ended: bool = False

    @property
    def headers(self) -> dict[str, str]:  # type: ignore[override]
        return (self.own or Context(1, 2)).headers

    def set(self, **attributes: Any) -> None:
        self.told |= attributes

    def link(self, context: Context) -> None:
        self.links.append(context)

    def fail(self, reason: str) -> None:
        self.failure = reason

    def end(self, at: float | None = None) -> None:
        self.ended = True


class Notebook:
    """A tracer that keeps the samples of even number."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._kept = {trace_of(group, sample) for group in range(-9, 20) for sample in range(0, 8, 2)}

    def sampled(self, trace_id: int) -> bool:
        return trace_id in self._kept

    def start(
        self, name: str, parent: Context | None, *, kind: Kind = "internal", own: Context | None = None,
        trace_id: int | None = None, links: Sequence[Context] = (), at: float | None = None,
    ) -> Seen:  # fmt: skip
        self.seen.append(Seen(name, parent, own, list(links), at))
        return self.seen[-1]


def trace_of(group: int, sample: int) -> int:
    return spans.sample_trace("r", "born", group, sample)


def place(group: int, sample: int, name: str) -> Context:
    return spans.fixed_context(trace_of(group, sample), name)


def task(group: int, sample: int, attempt: int = 0) -> Task:
    return Task(
        run="r", lane="train", group=group, sample=sample, group_size=4, prompt=pack_tokens([1]), prompt_ref=PromptRef("s", 0, 0),
        cursor=Cursor(0, 0), sampling=SamplingParams(max_tokens=1), seed=0, not_before_depth=0, attempt=attempt, admitted_at=7.0,
        deadline=9.0,
    )  # fmt: skip


def row(group: int, sample: int) -> BatchRow:
    return BatchRow(group, sample, 1, b"d", 1.0, 3, 5)


def begun(*records: Record) -> tuple[Notebook, Traces, Appending]:
    notebook = Notebook()
    traces = Traces(notebook, "r", "born")
    return notebook, traces, traces.begin(Chunk(list(records)))


def test_tasks_of_traced_samples_carry_their_admission_and_no_others_do() -> None:
    notebook, _, appending = begun(*(TaskRecord(writer="w", task=task(1, sample)) for sample in range(4)))
    assert [(span.name, span.parent, span.own, span.at) for span in notebook.seen] == [
        ("admit", None, place(1, sample, "admit"), 7.0) for sample in (0, 2)
    ]
    assert appending.headers == {0: place(1, 0, "admit").headers, 2: place(1, 2, "admit").headers}
    assert not any(span.ended for span in notebook.seen)
    appending.end()
    assert all(span.ended and span.failure is None for span in notebook.seen)


def test_an_append_that_fails_fails_its_spans() -> None:
    notebook, _, appending = begun(TaskRecord(writer="w", task=task(1, 0)))
    appending.end(ValueError("fenced"))
    assert (notebook.seen[0].failure, notebook.seen[0].ended) == ("ValueError: fenced", True)


def test_a_reissue_hangs_below_the_admission_and_is_what_the_next_attempt_hangs_below() -> None:
    notebook, _, appending = begun(ReissueRecord(writer="w", task=task(1, 2, attempt=1), reason="lost"))
    (span,) = notebook.seen
    assert (span.name, span.parent, span.told["attempt"], span.told["reason"]) == ("reissue", place(1, 2, "admit"), 1, "lost")
    assert 0 in appending.headers


def test_a_batch_is_linked_to_its_traced_rows_and_each_of_them_to_it_since_its_score_came() -> None:
    record = BatchRecord(writer="w", epoch=1, for_depth=4, rows=(row(1, 0), row(1, 1), row(2, 2)), at=50.0)
    notebook = Notebook()
    traces = Traces(notebook, "r", "born")
    score = {"traceparent": place(1, 0, "score").traceparent}
    traces.take(Message("towline.r.outcome.score.1.0", 9, b"", score, 42.0))
    traces.take(Message("towline.r.outcome.failure.2.2", 10, b"", score, 43.0))
    traces.take(Message("towline.r.outcome.score.2.2", 11, b"", {}, 44.0))
    appending = traces.begin(Chunk([record]))
    batch, *waits = notebook.seen
    own = spans.fixed_context(spans.batch_trace("r", "born", 1, 4), "batch")
    assert (batch.name, batch.parent, batch.own, batch.at) == ("batch", None, own, 50.0)
    assert batch.links == [place(1, 0, "trajectory"), place(2, 2, "trajectory")]
    assert appending.headers == {0: own.headers}
    assert [(wait.name, wait.parent, wait.links) for wait in waits] == [
        ("buffer", place(1, 0, "score"), [own]), ("buffer", place(2, 2, "score"), [own])
    ]  # fmt: skip
    assert waits[0].at == 42.0, "since its score came in"
    assert waits[1].at is not None
    assert waits[1].at > 1000.0, "its wait isn't known: now"
    assert [wait.told["staleness"] for wait in waits] == [1, 1]


def test_a_dropped_group_ends_the_traces_of_its_admitted_samples_with_the_reason() -> None:
    notebook, _, appending = begun(
        DropRecord(writer="w", lane="train", group=3, samples=4, reason="stale"),
        DropRecord(writer="w", lane="external", group=-3, samples=0, reason="unpaced", offered=4),
    )
    assert [(span.name, span.parent, span.told["reason"]) for span in notebook.seen] == [
        ("drop", place(3, 0, "admit"), "stale"), ("drop", place(3, 2, "admit"), "stale")
    ]  # fmt: skip
    assert appending.headers == {}


def test_an_evaluation_and_an_external_admission_follow_the_score() -> None:
    notebook, _, _ = begun(
        EvalRecord(writer="w", version=5, depth=4, wanted=1, rows=(EvalRow(4, 2, 1, b"d", 0.5),), mean=0.5),
        AdmitRecord(writer="w", lane="external", group=-2, sample=0, group_size=1),
        SnapshotRecord(writer="w", blob=b"b", covers=1, outcome_cursor=1),
    )
    assert [(span.name, span.parent) for span in notebook.seen] == [
        ("evaluate", place(4, 2, "score")), ("admit", place(-2, 0, "score"))
    ]  # fmt: skip
    assert notebook.seen[1].own == place(-2, 0, "admit")
