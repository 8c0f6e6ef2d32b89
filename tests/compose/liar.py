"""An S3 server that takes every put, If-None-Match or not: the kind that `towline init` must refuse. Run inside a container."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Liar(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._fine()

    def do_HEAD(self) -> None:
        self._fine()

    def do_GET(self) -> None:
        self._fine()

    def _fine(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef"')
        self.send_header("Content-Length", "0")
        self.end_headers()


ThreadingHTTPServer(("", 8333), Liar).serve_forever()
