"""The buffer's decisions as spans: a sample's admission, its way into a batch, its drop, and the batch itself.

Only what is traced costs anything; which samples are follows from their identity, so that another buffer says the same of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

from towline import spans
from towline.buffer.records import Chunk
from towline.bus.client import Message
from towline.contract.control import AdmitRecord, BatchRecord, DropRecord, EvalRecord, Record, ReissueRecord, TaskRecord
from towline.contract.groups import parse_group
from towline.spans import TRACEPARENT, Context, Span, Tracer

MOST_SCORED = 65536
"""Traced samples whose score's time is remembered until they are batched; of others the wait isn't known."""


@dataclass(slots=True)
class Appending:
    """The spans of one atomic append, until it stands."""

    spans: list[Span] = field(default_factory=list)
    headers: dict[int, dict[str, str]] = field(default_factory=dict)
    """Of the records that somebody works on, by their place."""

    def add(self, span: Span, place: int | None = None) -> Span:
        self.spans.append(span)
        if place is not None and span.headers is not None:
            self.headers[place] = span.headers
        return span

    def end(self, error: BaseException | None = None) -> None:
        for span in self.spans:
            if error is not None:
                span.fail(f"{type(error).__name__}: {error}")
            span.end()


class Traces:
    """Of one leadership of run `run`, whose CONTROL was created at `born`."""

    def __init__(self, tracer: Tracer, run: str, born: str) -> None:
        self._tracer, self._run, self._born = tracer, run, born
        self._scored: OrderedDict[tuple[int, int], float] = OrderedDict()

    def take(self, message: Message) -> None:
        """An outcome has come in."""
        if TRACEPARENT not in message.headers:
            return
        *_, kind, token, sample = message.subject.split(".")
        group = parse_group(token)
        if kind == "score" and group is not None and sample.isdecimal():
            self._scored[group, int(sample)] = message.at
            if len(self._scored) > MOST_SCORED:
                self._scored.popitem(last=False)

    def begin(self, chunk: Chunk) -> Appending:
        appending = Appending()
        for place, record in enumerate(chunk.records):
            self._of(record, place, appending)
        return appending

    def _of(self, record: Record, place: int, appending: Appending) -> None:
        match record:
            case TaskRecord(task=task) if (trace := self._traced(task.group, task.sample)) is not None:
                admit = spans.fixed_context(trace, "admit")
                span = self._tracer.start("admit", None, kind="producer", own=admit, at=task.admitted_at)
                span.set(group=task.group, sample=task.sample, lane=task.lane, least_depth=task.not_before_depth)
                appending.add(span, place)
            case ReissueRecord(task=task) if (trace := self._traced(task.group, task.sample)) is not None:
                span = self._tracer.start("reissue", spans.fixed_context(trace, "admit"), kind="producer")
                span.set(group=task.group, sample=task.sample, attempt=task.attempt, reason=record.reason)
                appending.add(span, place)
            case AdmitRecord() if (trace := self._traced(record.group, record.sample)) is not None:
                admit, score = spans.fixed_context(trace, "admit"), spans.fixed_context(trace, "score")
                span = self._tracer.start("admit", score, own=admit)
                span.set(group=record.group, sample=record.sample, lane=record.lane)
                appending.add(span)
            case BatchRecord():
                self._batch(record, place, appending)
            case DropRecord():
                for sample in range(record.samples):
                    if (trace := self._traced(record.group, sample)) is not None:
                        span = self._tracer.start("drop", spans.fixed_context(trace, "admit"))
                        span.set(group=record.group, sample=sample, reason=record.reason)
                        appending.add(span)
                        self._scored.pop((record.group, sample), None)
            case EvalRecord():
                for row in record.rows:
                    if (trace := self._traced(row.group, row.sample)) is not None:
                        span = self._waited("evaluate", row.group, row.sample, trace, ())
                        span.set(version=record.version, depth=record.depth, reward=row.reward)
                        appending.add(span)

    def _batch(self, record: BatchRecord, place: int, appending: Appending) -> None:
        trace = spans.batch_trace(self._run, self._born, record.epoch, record.for_depth)
        own = spans.fixed_context(trace, "batch")
        batch = self._tracer.start("batch", None, kind="producer", own=own, at=record.at)
        batch.set(epoch=record.epoch, for_depth=record.for_depth, rows=len(record.rows))
        appending.add(batch, place)
        for row in record.rows:
            if (sample := self._traced(row.group, row.sample)) is not None:
                batch.link(spans.fixed_context(sample, "trajectory"))
                span = self._waited("buffer", row.group, row.sample, sample, (own,))
                span.set(for_depth=record.for_depth, staleness=record.for_depth - row.least_depth)
                appending.add(span)

    def _waited(self, name: str, group: int, sample: int, trace: int, links: tuple[Context, ...]) -> Span:
        """From the score's coming in to the decision."""
        since = self._scored.pop((group, sample), None)
        span = self._tracer.start(
            name, spans.fixed_context(trace, "score"), links=links, at=time.time() if since is None else since
        )
        span.set(group=group, sample=sample)
        return span

    def _traced(self, group: int, sample: int) -> int | None:
        """The sample's trace, if it's one that is kept."""
        trace = spans.sample_trace(self._run, self._born, group, sample)
        return trace if self._tracer.sampled(trace) else None
