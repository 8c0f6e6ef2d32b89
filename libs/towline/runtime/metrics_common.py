"""What every service exports besides its own: readiness, its lease, the bus, the store's calls and their errors, dead letters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from prometheus_client import Counter, Histogram

from towline.bus.client import Bus
from towline.errors import MissingError, TowlineError
from towline.runtime.health import Health
from towline.runtime.metrics import Metrics
from towline.store.objects import ObjectInfo, ObjectStore

T = TypeVar("T")
STORE_BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class MeteredStore:
    """An object store whose calls are timed and whose faults are counted. That an object isn't there is no fault."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._seconds: Histogram | None = None
        self._errors: Counter | None = None

    def show(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram(
            "store_request_duration_seconds", "Calls to the object store, retries included", ["operation"], STORE_BUCKETS
        )
        self._errors = metrics.counter(
            "store_errors", "Calls to the object store that failed, by the error's code", ["operation", "code"]
        )

    @property
    def url(self) -> str:
        return self._objects.url

    def get(self, key: str) -> bytes:
        return self._timed("get", lambda: self._objects.get(key))

    def stream(self, key: str) -> Iterator[bytes]:
        began = time.perf_counter()
        try:
            yield from self._objects.stream(key)
        except TowlineError as error:
            self._failed("stream", error)
            raise
        finally:
            self._took("stream", began)

    def put(self, key: str, data: bytes | Path) -> None:
        self._timed("put", lambda: self._objects.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return self._timed("create", lambda: self._objects.create(key, data))

    def stat(self, key: str) -> ObjectInfo | None:
        return self._timed("stat", lambda: self._objects.stat(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        began = time.perf_counter()
        try:
            yield from self._objects.list(prefix)
        except TowlineError as error:
            self._failed("list", error)
            raise
        finally:
            self._took("list", began)

    def delete(self, key: str) -> None:
        self._timed("delete", lambda: self._objects.delete(key))

    def check(self, *, writes: bool = True) -> None:
        self._objects.check(writes=writes)

    def _timed(self, operation: str, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return call()
        except TowlineError as error:
            self._failed(operation, error)
            raise
        finally:
            self._took(operation, began)

    def _took(self, operation: str, began: float) -> None:
        if self._seconds is not None:
            self._seconds.labels(operation).observe(time.perf_counter() - began)

    def _failed(self, operation: str, error: TowlineError) -> None:
        if self._errors is not None and not isinstance(error, MissingError):
            self._errors.labels(operation, error.code).inc()


class CommonMetrics:
    """Made once a service; `lease_acquired` is called where it gets its lease."""

    def __init__(self, metrics: Metrics, *, health: Health, bus: Bus, replica: str, run: str) -> None:
        about = metrics.gauge("info", "1, with what this process is", ["run", "replica"])
        about.labels(run, replica).set(1)
        metrics.gauge("ready", "1 where /readyz says so").set_function(lambda: float(health.is_ready))
        metrics.gauge("bus_connected", "1 while the connection to the bus stands").set_function(lambda: float(bus.connected))
        lost = metrics.counter("bus_disconnects", "Times that the connection to the bus was lost")
        bus.connection.on_change(lost.inc)
        letters = metrics.counter("dead_letters", "Messages that this process put into DEAD, by stage", ["stage"])
        bus.on_dead = lambda stage: letters.labels(stage).inc()
        self._lease = metrics.gauge(
            "lease_acquired_timestamp_seconds", "When this process got the service's lease, Unix seconds; 0: it has none"
        )

    def lease_acquired(self) -> None:
        self._lease.set(time.time())
