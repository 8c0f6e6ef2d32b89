"""A stream's subjects, which nats-server tells 100,000 at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


async def paged_subjects(ask: Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]], pattern: str) -> set[str]:
    """The subjects that match `pattern`, from `ask`, which makes one STREAM.INFO request; None from it: there is no stream."""
    found: set[str] = set()
    offset = 0
    while True:
        info = await ask({"subjects_filter": pattern, "offset": offset})
        page = (info or {}).get("state", {}).get("subjects") or {}
        found.update(page)
        offset += len(page)  # not what was found: a stream that changes meanwhile may tell a subject twice
        if info is None or not page or offset >= info.get("total", 0):
            return found
