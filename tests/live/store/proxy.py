"""An HTTP proxy in front of the real S3 server that fails a request in a chosen way."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Act = Literal["pass", "drop", "forward-and-drop", "cut"] | tuple[int, str]
"""drop: before the server sees it; cut: half of the answer's body; (status, S3 error code): answered by the proxy."""


@dataclass
class S3Proxy:
    port: int = 0
    decide: Callable[[str, str], Act] = lambda method, path: "pass"
    """(method, path) -> what to do."""
    change_status: dict[int, int] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def s3_proxy(endpoint: str) -> Iterator[S3Proxy]:
    target = urlsplit(endpoint).netloc
    proxy = S3Proxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            proxy.requests.append((self.command, self.path))
            act = proxy.decide(self.command, self.path)
            if act == "drop":
                return self.hang_up()
            if isinstance(act, tuple):
                text = f"<?xml version='1.0'?><Error><Code>{act[1]}</Code><Message>chosen</Message></Error>".encode()
                return self.answer(act[0], [("content-type", "application/xml")], text)
            server = http.client.HTTPConnection(target, timeout=20)
            server.request(self.command, self.path, body, dict(self.headers.items()))
            reply = server.getresponse()
            data = reply.read()
            server.close()
            if act == "forward-and-drop":
                return self.hang_up()
            headers = [(k, v) for k, v in reply.getheaders() if k.lower() not in ("transfer-encoding", "connection")]
            status = proxy.change_status.get(reply.status, reply.status)
            return self.answer(status, headers, data, cut=act == "cut")

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.hang_up()

        def hang_up(self) -> None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
