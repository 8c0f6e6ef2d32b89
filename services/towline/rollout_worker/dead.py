"""Dead letters of a worker: what nobody could act on is kept whole where there's room; where there isn't, work goes on."""

from __future__ import annotations

import asyncio

import structlog

from towline.bus.client import Bus, Message
from towline.errors import TowlineError

_SECONDS = 10.0
_log = structlog.get_logger("towline.rollout_worker")


async def dead_letter(bus: Bus, stage: str, message: Message, reason: str, **context: object) -> None:
    """Into DEAD, with where it came from."""
    try:
        async with asyncio.timeout(_SECONDS):
            await bus.dead(stage, message.data, reason, sequence=message.sequence, subject=message.subject, **context)
    except (TimeoutError, TowlineError) as error:
        _log.error("dead_letter_lost", stage=stage, subject=message.subject, reason=str(error) or "out of time")
