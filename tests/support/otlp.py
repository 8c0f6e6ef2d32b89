"""An OTLP collector for tests: takes ExportTraceServiceRequest over HTTP and keeps the spans. It can be slow, rude or absent."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class SpanSeen:
    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: a root."""
    links: tuple[tuple[str, str], ...]
    attributes: dict[str, Any]
    failed: bool
    start: float
    end: float


@dataclass
class Collector:
    """`spans` grows as requests come in."""

    url: str = ""
    spans: list[SpanSeen] = field(default_factory=list)
    requests: int = 0
    answer: int = 200
    silent_seconds: float = 0.0
    """How long it takes to answer."""

    def take(self, data: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            named = {item.key: _plain(item.value) for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        SpanSeen(
                            service=named["service.name"], instance=named["service.instance.id"], name=span.name,
                            trace_id=span.trace_id.hex(), span_id=span.span_id.hex(), parent_id=span.parent_span_id.hex(),
                            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                            attributes={item.key: _plain(item.value) for item in span.attributes},
                            failed=span.status.code == Status.STATUS_CODE_ERROR,
                            start=span.start_time_unix_nano / 1e9, end=span.end_time_unix_nano / 1e9,
                        )
                    )  # fmt: skip

    def named(self, name: str) -> list[SpanSeen]:
        return [span for span in self.spans if span.name == name]

    def by_id(self) -> dict[tuple[str, str], SpanSeen]:
        return {(span.trace_id, span.span_id): span for span in self.spans}


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            collector.requests += 1
            time.sleep(collector.silent_seconds)
            if collector.answer == 200 and self.path == "/v1/traces":
                collector.take(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
            self.send_response(collector.answer if self.path == "/v1/traces" else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
