"""Recorded messages once more, at their own pace, at a multiple of it, at once, or one by one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from towline.bundle.select import Selected


async def paced(
    items: AsyncGenerator[Selected, None],
    *,
    speed: float,
    limit: int | None = None,
    wait: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[Selected, None]:
    """`items`, at most `limit`: each when it's due at `speed` times the recorded pace (0: at once). `wait` holds up each one.

    What is due counts from the first item, so that a slow reader's delay is made up, not added.
    """
    began: tuple[float, float] | None = None
    count = 0
    async with contextlib.aclosing(items):
        async for item in items:
            if limit is not None and count >= limit:
                return
            count += 1
            if began is None:
                began = (time.monotonic(), item.message.at)
            if speed > 0:
                due = began[0] + (item.message.at - began[1]) / speed
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if wait is not None:
                await wait()
            yield item
