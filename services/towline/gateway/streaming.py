"""Answers as server-sent events. Before an answer's end is told, its format has kept what must be kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import msgspec
import structlog

from towline.gateway import answers
from towline.gateway.answers import ApiError
from towline.gateway.jobs import Choice

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_log = structlog.get_logger("towline.gateway")


class Format(Protocol):
    """How an answer is written."""

    def whole(self) -> Any: ...

    def pieces(self, moved: list[Choice]) -> list[dict[str, Any]]:
        """The next events: what is new of these choices."""
        ...

    def last_piece(self) -> dict[str, Any] | None: ...

    async def keep(self) -> None:
        """Once, when every choice has its finish, before anybody is told so."""
        ...


async def server_sent(
    first: list[Choice] | None, events: AsyncGenerator[list[Choice], None], choices: list[Choice], form: Format, route: str
) -> AsyncIterator[bytes]:
    """`first`, then the rest of `events`. An answer that can't go on ends with an `error` event and without [DONE]."""
    try:
        moved = first
        while moved is not None:
            if all(choice.finish is not None for choice in choices):
                await form.keep()
            for piece in form.pieces(moved):
                yield _event(piece)
            moved = await anext(events, None)
        if (last := form.last_piece()) is not None:
            yield _event(last)
        yield DONE
    except (ApiError, *answers.FAULTS) as error:
        fault = error if isinstance(error, ApiError) else answers.of(error)
        _log.info("stream_ended_early", route=route, reason=fault.message)
        yield _event(fault.body if "error" in fault.body else {"error": fault.body})


def _event(tree: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(tree) + b"\n\n"
