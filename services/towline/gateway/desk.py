"""From a request to a job: who asks, how long it may wait, what its Idempotency-Key says."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect, Request

from towline.config import GatewaySettings
from towline.errors import UnavailableError
from towline.gateway.answers import ApiError, invalid
from towline.gateway.idempotency import Held, Ledger
from towline.gateway.jobs import Job
from towline.gateway.plans import Plan
from towline.gateway.samples import Sample, Sampler

MOST_KEY_CHARACTERS = 255
DISCARDED_BYTES = 1 << 20
BODY_SECONDS = 60.0
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?:$|[,;\s])", re.IGNORECASE)


async def read_body(request: Request, most: int) -> bytes:
    """The body; 413 where it is over `most` bytes. Of one that is a little over, the rest is read too, since a client that
    still sends wouldn't see the answer."""
    said = request.headers.get("content-length", "")
    size = int(said[:18]) if said.isascii() and said.isdigit() else 0
    if size > most + DISCARDED_BYTES:
        raise _too_large(most)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most + DISCARDED_BYTES:
                    break
                if size <= most:
                    parts.append(part)
        if size > most:
            raise _too_large(most)
    except TimeoutError:
        raise ApiError(408, "invalid_request_error", f"the body didn't come within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "client_closed_request", "the client went away") from None
    return b"".join(parts)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, "invalid_request_error", f"the body is over gateway.max_body_bytes = {most}", headers={"Connection": "close"}
    )


def wait_seconds(request: Request, most: float) -> float:
    """`Prefer: wait=N` (RFC 7240), as far as the settings allow; else 0."""
    for value in request.headers.getlist("prefer"):
        if (found := _WAIT.search(value)) is not None:
            return min(float(found[1]), most)
    return 0.0


class Desk:
    """Makes jobs."""

    def __init__(self, settings: GatewaySettings, sampler: Sampler, ledger: Ledger) -> None:
        self._settings, self._sampler, self._ledger = settings, sampler, ledger

    async def job(
        self, request: Request, *, tenant: str, route: str, body: bytes, prefix: str, make: Callable[[], Plan]
    ) -> tuple[Plan, Job]:
        """What an HTTP request asks for, with its headers."""
        return await self.planned(
            tenant=tenant, route=route, body=body, prefix=prefix, make=make, key=request.headers.get("idempotency-key"),
            waits=wait_seconds(request, self._settings.max_wait_seconds),
        )  # fmt: skip

    async def planned(
        self, *, tenant: str, route: str, body: bytes, prefix: str, make: Callable[[], Plan], key: str | None, waits: float
    ) -> tuple[Plan, Job]:
        """The plan, which is made off the event loop, and its job. Under a key the job begins with what stood of it; `route` and
        `body` must be those of before."""
        plan = await asyncio.to_thread(make)
        name, created = f"{prefix}{secrets.token_hex(12)}", int(time.time())
        if key is None:
            choices = plan.choices(plan.prompts, plan.seed, waits, [])
            return plan, Job(name, created, choices, self._sampler)
        if not 1 <= len(key) <= MOST_KEY_CHARACTERS:
            raise invalid(f"Idempotency-Key: use 1 to {MOST_KEY_CHARACTERS} characters")
        held = await self._ledger.take(
            tenant, key, route.encode() + b"\0" + body, name=name, created=created, seed=plan.seed, prompts=plan.prompts
        )
        return plan, await self._held_job(held, plan, waits)

    async def _held_job(self, held: Held, plan: Plan, waits: float) -> Job:
        prompts, record = await held.prompts(), held.record
        if len(prompts) != len(plan.prompts):
            raise UnavailableError("what stands under the Idempotency-Key isn't this request's: use a new key")
        choices = plan.choices(prompts, record.seed, waits, held.samples)
        samples: Sequence[Sample] = [choice.sample for choice in choices]

        async def keep() -> None:
            await held.save(samples)

        whole = held.samples and all(sample.finish is not None for sample in held.samples)
        return Job(record.name, record.created, choices, self._sampler, None if whole else keep)
