"""How many sessions a tenant may have open at a time, over all gateways."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping

from towline.config import TenantSettings
from towline.gateway.answers import ApiError
from towline.gateway.session_store import SessionStore

MOST_RETRY_SECONDS = 60


class Rooms:
    """Counts what stands in the bucket. Of one gateway exact; as many gateways as open a tenant's last one in the same moment
    may each do so."""

    def __init__(self, store: SessionStore, tenants: Mapping[str, TenantSettings]) -> None:
        self._store = store
        self._most = {name: one.sessions for name, one in tenants.items() if one.sessions}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._coming: defaultdict[str, int] = defaultdict(int)

    @contextlib.asynccontextmanager
    async def room(self, tenant: str) -> AsyncIterator[None]:
        """While a session of the tenant's is made; 429 with Retry-After where it has too many."""
        if (most := self._most.get(tenant)) is None:
            yield
            return
        async with self._turns[tenant]:
            now = time.time()
            ends = sorted(
                entry.expires_at
                for entry in (await self._store.entries()).values()
                if entry.tenant == tenant and entry.state in ("open", "finishing") and entry.expires_at > now
            )
            if len(ends) + self._coming[tenant] >= most:
                seconds = min(max(math.ceil(ends[0] - now), 1), MOST_RETRY_SECONDS) if ends else 1
                raise ApiError(
                    429, "rate_limit_error",
                    f"tenant {tenant} has {most} sessions open, as many as it may have at a time: finish or delete one",
                    headers={"Retry-After": str(seconds)},
                )  # fmt: skip
            self._coming[tenant] += 1
        try:
            yield
        finally:
            self._coming[tenant] -= 1
