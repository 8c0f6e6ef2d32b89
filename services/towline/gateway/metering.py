"""What the API counts of its requests, whichever protocol they come by."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from towline.runtime.metrics import Metrics


class Metering:
    """By route; `running` requests that are at work now."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram("e2e_request_latency_seconds", "From the request to its end", ["route"])
        self._first = metrics.histogram("time_to_first_token_seconds", "From a streamed request to its first tokens", ["route"])
        self._answers = metrics.counter("requests", "Answers by route and status, refusals among them", ["route", "status"])
        self._tokens = metrics.counter("generation_tokens", "Tokens that were sent", ["route"])
        self.running = 0

    @contextlib.contextmanager
    def request(self, route: str, began: float) -> Iterator[None]:
        """While it runs, since `began` (monotonic seconds)."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._seconds.labels(route).observe(time.monotonic() - began)

    def first_tokens(self, route: str, began: float) -> None:
        self._first.labels(route).observe(time.monotonic() - began)

    def answered(self, route: str, status: str) -> None:
        """`status`: HTTP's number or gRPC's name."""
        self._answers.labels(route, status).inc()

    def sent(self, route: str, tokens: int) -> None:
        self._tokens.labels(route).inc(tokens)
