"""Who may send requests, how many a minute and how many at a time. Counts are this gateway's own."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from towline.config import TenantSettings
from towline.errors import UsageError
from towline.gateway.answers import ApiError

ANYBODY = "-"
"""The tenant where none is configured."""


@dataclass(slots=True)
class _Counts:
    allowance: float
    at: float
    running: int = 0


class Tenants:
    """Nobody needs a token where no tenant is configured: the gateway then listens on loopback alone. `UsageError` where a token
    can't tell whose it is."""

    def __init__(self, settings: Mapping[str, TenantSettings], clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._tokens = {name: one.secret.encode() for name, one in settings.items()}
        for name, token in self._tokens.items():
            if not (token.isascii() and token.decode().isprintable()) or token != token.strip():
                raise UsageError(
                    f"gateway.tenants.{name}: a header can't carry its token: use printable ASCII", code="tenant_token"
                )
            same = [other for other, value in self._tokens.items() if value == token]
            if len(same) > 1:
                raise UsageError(
                    f"gateway.tenants: {' and '.join(same)} have the same token: give each its own", code="tenant_token"
                )
        self._counts = {name: _Counts(float(one.requests_per_minute), clock()) for name, one in settings.items()}

    def of(self, authorization: str) -> str:
        """The tenant whose token this is; 401 where it's nobody's. Every token is compared, each in constant time."""
        if not self._settings:
            return ANYBODY
        scheme, _, given = authorization.partition(" ")
        found = None
        for name, token in self._tokens.items():
            if hmac.compare_digest(given.strip().encode("utf-8", "replace"), token):
                found = name
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401, "authentication_error", "a bearer token of one of gateway.tenants is needed",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        return found

    def of_request(self, headers: Mapping[str, str]) -> str:
        """The same of an HTTP request. Where nobody needs a token, a page in this machine's browser does neither get through by
        its own name that was pointed here nor by sending forms here: 403."""
        tenant = self.of(headers.get("authorization", ""))
        if tenant == ANYBODY:
            names = [
                headers.get("host", ""),
                *(origin.rpartition("//")[2] for origin in [headers.get("origin")] if origin is not None),
            ]
            if not all(map(names_this_machine, names)):
                raise ApiError(403, "permission_error", "without gateway.tenants only this machine is answered, as localhost")
        return tenant

    @contextlib.contextmanager
    def admitted(self, tenant: str) -> Iterator[None]:
        """While the request runs; 429 with Retry-After where the tenant has too many."""
        if tenant == ANYBODY:
            yield
            return
        limits, counts, now = self._settings[tenant], self._counts[tenant], self._clock()
        if limits.concurrent and counts.running >= limits.concurrent:
            raise _too_many(f"{counts.running} requests of tenant {tenant} run, as many as it may have at a time", 1)
        if rate := limits.requests_per_minute:
            counts.allowance = min(float(rate), counts.allowance + (now - counts.at) * rate / 60)
            counts.at = now
            if counts.allowance < 1:
                seconds = math.ceil((1 - counts.allowance) * 60 / rate)
                raise _too_many(f"tenant {tenant} has sent its {rate} requests a minute", seconds)
            counts.allowance -= 1
        counts.running += 1
        try:
            yield
        finally:
            counts.running -= 1


def _too_many(message: str, seconds: int) -> ApiError:
    return ApiError(429, "rate_limit_error", message, headers={"Retry-After": str(seconds)})


def names_this_machine(header: str) -> bool:
    """Whether a Host header does."""
    host = header.partition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
