"""A collector that answers with more than a status: it gets its spans, and neither memory nor anything of the next place."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace.export import SpanExportResult

from towline.runtime.tracing_otlp import OtlpTracing

MOST_SENT = 64 << 20
"""A reader of the body would take all of it; a socket's buffers hold a few MB."""


@contextmanager
def answering(head: bytes, *, endless: bool) -> Iterator[tuple[str, list[int], list[bytes]]]:
    """A server's URL, the bytes of a body that each client let it send, the first line of each request."""
    sent: list[int] = []
    asked: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                asked.append(client.recv(65536).partition(b"\r\n")[0])
                sent.append(0)
                client.sendall(head)
                while endless and sent[-1] < MOST_SENT:
                    client.sendall(b"x" * 65536)
                    sent[-1] += 65536

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", sent, asked
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def exported(url: str) -> SpanExportResult:
    tracing = OtlpTracing(endpoint=url, ratio=1.0, service="x", replica="r", run="small", timeout_seconds=10.0)
    try:
        return tracing._exporter.export(())
    finally:
        tracing.close(0.0)


def test_a_body_without_an_end_is_not_read() -> None:
    with answering(b"HTTP/1.1 200 OK\r\n\r\n", endless=True) as (url, sent, _):
        assert exported(url) is SpanExportResult.SUCCESS
    assert len(sent) == 1
    assert sent[0] < MOST_SENT


def test_a_redirect_is_followed_nowhere_and_counts_as_lost() -> None:
    head = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    with answering(head, endless=False) as (url, _, asked):
        assert exported(url) is SpanExportResult.FAILURE
    assert asked == [b"POST /v1/traces HTTP/1.1"]
