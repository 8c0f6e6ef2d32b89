"""A service's Prometheus metrics: those it makes, its process's, and a gauge for every number among its status figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")
SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """`towline_SERVICE_…`; several may live in one process, each has a registry of its own."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"towline_{_NOT_IN_NAMES.sub('_', service)}"
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"{self._prefix}_{name}", text, labels, registry=self.registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS
    ) -> Histogram:
        return Histogram(f"{self._prefix}_{name}", text, labels, registry=self.registry, buckets=buckets)

    def show_figures(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        """A gauge for each number that `figures()` has, and one with the label `key` for each mapping of numbers."""
        self.registry.register(_Figures(self._prefix, figures))

    def render(self) -> bytes:
        """The registry in Prometheus' text format."""
        return generate_latest(self.registry)


class _Figures(Collector):
    def __init__(self, prefix: str, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._prefix = prefix
        self._figures = figures

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # what there is, is known only when it's asked for

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._figures().items():
            full = f"{self._prefix}_{_NOT_IN_NAMES.sub('_', name)}"
            if isinstance(value, int | float):
                yield GaugeMetricFamily(full, f"status figure {name}", value=float(value))
            elif isinstance(value, Mapping):
                family = GaugeMetricFamily(full, f"status figure {name}", labels=["key"])
                for key, item in value.items():
                    if isinstance(item, int | float):
                        family.add_metric([str(key)], float(item))
                yield family
