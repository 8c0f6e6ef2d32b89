"""How far home has taken a site's messages in, by what its own messages say."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from towline.bus.jetstream import JetStream
from towline.bus.origins import origins


async def newest_taken(
    jetstream: JetStream, stream: str, sites: Sequence[str], *, start: int, end: int | None = None
) -> tuple[dict[str, int], int]:
    """Site -> its highest sequence among home's messages [start, end), without their data; and the first sequence not read."""
    found: dict[str, int] = {}
    after = start
    async with contextlib.aclosing(origins(jetstream, stream, sites, start=start, end=end)) as messages:
        async for message, origin in messages:
            after = message.sequence + 1
            if origin is not None:
                found[origin.site] = max(found.get(origin.site, 0), origin.sequence)
    return found, after
