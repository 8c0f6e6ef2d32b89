"""The web view's files, as they lie in ui/ beside this module: read once, sent with an ETag and a policy that lets little in."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("ui")
_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Trajectory text is hostile: even where a script came into the page, the browser wouldn't run it."""


def etag_of(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def unless_known(request: Request, data: bytes, headers: dict[str, str]) -> Response:
    """304 where the browser has these bytes."""
    headers = {**HEADERS, **headers, "ETag": etag_of(data)}
    if headers["ETag"] in (one.strip() for one in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers)


class Files:
    """By name, `js/app.js` for one. There are no others than those that lay there at the start."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.suffix in _TYPES
        }

    def answer(self, request: Request, name: str) -> Response:
        data = self._files.get(name)
        if data is None:
            return Response("no such file", 404, HEADERS, "text/plain")
        return unless_known(request, data, {"Content-Type": _TYPES[Path(name).suffix], "Cache-Control": "no-cache"})
