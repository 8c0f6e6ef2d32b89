"""Spans as OpenTelemetry's SDK keeps and exports them: OTLP over HTTP, from a thread and a bounded queue of the SDK's own.

A span is handed to the SDK when it ends, whole: so its number can be settled last, and what never ends is never exported.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import requests
import structlog
from opentelemetry.context import Context as SdkContext
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from towline import spans
from towline.runtime.metrics import Metrics
from towline.runtime.tracing import CLOSE_SECONDS
from towline.spans import Context, Kind, Span, Value

MOST_LINKS = 8192
"""Of one span: a batch's rows, where all are traced."""
QUEUE_SPANS = 16384
_TRACES_PATH = "/v1/traces"
_NANOSECONDS = 1_000_000_000
_KINDS: dict[Kind, SpanKind] = {
    "internal": SpanKind.INTERNAL, "producer": SpanKind.PRODUCER, "consumer": SpanKind.CONSUMER, "client": SpanKind.CLIENT,
    "server": SpanKind.SERVER,
}  # fmt: skip
_log = structlog.get_logger("towline.tracing")


class OtlpTracing:
    """`towline.runtime.tracing.Tracing` over a collector at `endpoint` (its base URL; empty: where OTEL_… says)."""

    def __init__(self, *, endpoint: str, ratio: float, service: str, replica: str, run: str, timeout_seconds: float) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would say a line for each span; see _Telling
        self._exporter = _Telling(
            OTLPSpanExporter(
                endpoint=endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH if endpoint else None,
                timeout=timeout_seconds,
                session=_StatusAlone(),
            )
        )
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=Resource.create(
                {
                    "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"towline-{service}",
                    "service.namespace": "towline",
                    "service.instance.id": replica,
                    "towline.run": run,
                }
            ),
            sampler=ALWAYS_ON,
            id_generator=self._ids,
            span_limits=SpanLimits(max_links=MOST_LINKS),
            shutdown_on_exit=False,
        )  # fmt: skip
        most = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or QUEUE_SPANS)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=most))
        self.tracer = OtlpTracer(self._provider, self._ids, ratio)

    def show(self, metrics: Metrics) -> None:
        ended = metrics.counter("spans_ended_total", "Spans that ended in this process")
        exported = metrics.counter("spans_exported_total", "Spans that the collector took")
        failed = metrics.counter("spans_failed_total", "Spans that the collector did not take in time")
        self.tracer.ended = ended.inc
        self._exporter.exported, self._exporter.failed = exported.inc, failed.inc

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        spans.install(None)
        if self._exporter.away:
            return
        ending = threading.Thread(target=self._provider.shutdown, name="towline-spans", daemon=True)
        ending.start()
        ending.join(seconds)


class OtlpTracer:
    """`towline.spans.Tracer`."""

    def __init__(self, provider: TracerProvider, ids: _Ids, ratio: float) -> None:
        self._tracer = provider.get_tracer("towline")
        self._ids = ids
        self._bound = round(ratio * (1 << 64))
        self.ended: Any = lambda: None

    def sampled(self, trace_id: int) -> bool:
        """As OpenTelemetry's TraceIdRatioBased, so that its samplers of the same ratio agree."""
        return trace_id & 0xFFFFFFFFFFFFFFFF < self._bound

    def start(
        self,
        name: str,
        parent: Context | None,
        *,
        kind: Kind = "internal",
        own: Context | None = None,
        trace_id: int | None = None,
        links: Sequence[Context] = (),
        at: float | None = None,
    ) -> Span:
        fixed = own is not None
        if own is None:
            trace_id = (parent.trace_id if parent is not None else random.getrandbits(128) or 1) if trace_id is None else trace_id
            own = Context(trace_id, random.getrandbits(64) or 1)
        return OtlpSpan(self, name, parent, kind, own, list(links), time.time() if at is None else at, fixed)

    def record(self, span: OtlpSpan, at: float | None) -> None:
        """Hand an ended span to the SDK."""
        self._ids.next = span.context
        made = self._tracer.start_span(
            span.name,
            context=SdkContext() if span.parent is None else set_span_in_context(_remote(span.parent), SdkContext()),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            links=[Link(_place(context)) for context in span.links],
            start_time=int(span.began * _NANOSECONDS),
        )
        if span.failure is not None:
            made.set_status(Status(StatusCode.ERROR, span.failure))
        made.end(int((time.time() if at is None else at) * _NANOSECONDS))
        self.ended()


class OtlpSpan:
    """`towline.spans.Span`, until its end."""

    __slots__ = (
        "_fixed",
        "_over",
        "_token",
        "_tracer",
        "attributes",
        "began",
        "context",
        "failure",
        "kind",
        "links",
        "name",
        "parent",
    )

    def __init__(
        self,
        tracer: OtlpTracer,
        name: str,
        parent: Context | None,
        kind: Kind,
        own: Context,
        links: list[Context],
        began: float,
        fixed: bool,
    ) -> None:
        self._tracer, self.name, self.parent, self.kind, self.context = tracer, name, parent, kind, own
        self.links, self.began, self._fixed = links, began, fixed
        self.attributes: dict[str, Any] = {}
        self.failure: str | None = None
        self._token: Any = None
        self._over = False

    @property
    def headers(self) -> dict[str, str]:
        return self.context.headers

    def set(self, **attributes: Value | Sequence[int] | None) -> None:
        for name, value in attributes.items():
            if value is not None:
                self.attributes[f"towline.{name}"] = value

    def link(self, context: Context) -> None:
        self.links.append(context)

    def renumber(self) -> None:
        self.context = Context(self.context.trace_id, random.getrandbits(64) or 1)

    def fail(self, reason: str) -> None:
        self.failure = reason
        if self._fixed:
            self.renumber()

    def end(self, at: float | None = None) -> None:
        if not self._over:
            self._over = True
            self._tracer.record(self, at)

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> OtlpSpan:
        self._token = spans.current.set(self.context)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(ValueError):  # a stream's end may come in another task, whose context goes with it
            spans.current.reset(self._token)
        if kind is not None and kind is not GeneratorExit and self.failure is None:
            self.fail(f"{kind.__name__}: {error}"[:1000])
        self.end()


class _Ids(IdGenerator):
    """Gives the SDK the ids that a span has already. Both are asked for within `start_span`, on the thread that set `next`."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def next(self) -> Context:
        found: Context = self._local.next
        return found

    @next.setter
    def next(self, context: Context) -> None:
        self._local.next = context

    def generate_span_id(self) -> int:
        return self.next.span_id

    def generate_trace_id(self) -> int:
        return self.next.trace_id


class _StatusAlone(requests.Session):
    """Takes a collector's status and nothing else of its answer: a body could have no end, a redirect could lead anywhere."""

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        with super().request(*args, **{**kwargs, "stream": True, "allow_redirects": False}) as response:
            response.raw.close()
        response.raw = io.BytesIO()
        if response.is_redirect:
            raise requests.TooManyRedirects(f"status {response.status_code}: name the collector where it is")
        return response


class _Telling(SpanExporter):
    """Counts what is exported, and says once that the collector is away and once that it's back."""

    def __init__(self, inner: OTLPSpanExporter) -> None:
        self._inner = inner
        self.away = False
        self.exported: Any = lambda count: None
        self.failed: Any = lambda count: None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        taken = result is SpanExportResult.SUCCESS
        (self.exported if taken else self.failed)(len(spans))
        if taken == self.away:
            self.away = not taken
            if taken:
                _log.info("collector_back")
            else:
                _log.warning("collector_away", reason="spans that it doesn't take are dropped; the service goes on")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _place(context: Context) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _remote(context: Context) -> NonRecordingSpan:
    return NonRecordingSpan(_place(context))
