"""A service's Prometheus metrics: those it makes, its process's, and its status figures under the catalogue's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from towline.runtime.metrics_catalogue import Shown

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter and histogram, which says what resets say as well

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

    def show_figures(self, figures: Callable[[], Mapping[str, Any]], shown: Sequence[Shown] = ()) -> None:
        """The figures as metrics, under the names that `shown` gives them; without it a gauge for each number, under its own,
        and for each mapping of numbers one with the label `key`."""
        self.registry.register(_Named(self._prefix, figures, shown) if shown else _Figures(self._prefix, figures))

    def show_histogram(self, name: str, text: str, counts: Callable[[], Mapping[int, int]], buckets: Sequence[int]) -> None:
        """A histogram of whole numbers that are counted elsewhere: `counts()` says how often there is which."""
        self.registry.register(_Counted(f"{self._prefix}_{name}", text, counts, buckets))

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


class _Named(Collector):
    """Figures under the names of a catalogue. A figure that isn't there, or no number, is a metric without a sample."""

    def __init__(self, prefix: str, figures: Callable[[], Mapping[str, Any]], shown: Sequence[Shown]) -> None:
        self._prefix, self._figures, self._shown = prefix, figures, shown

    def describe(self) -> Iterable[Metric]:
        return [self._family(one) for one in self._shown]

    def collect(self) -> Iterable[Metric]:
        figures = self._figures()
        for one in self._shown:
            family = self._family(one)
            value: Any = figures
            for part in one.figure.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if isinstance(value, Mapping) and one.label:
                for key, item in value.items():
                    if isinstance(item, int | float):
                        family.add_metric([str(key)], float(item))
            elif isinstance(value, Mapping):
                family.add_metric([], float(len(value)))
            elif isinstance(value, int | float):
                family.add_metric([], float(value))
            yield family

    def _family(self, one: Shown) -> GaugeMetricFamily | CounterMetricFamily:
        kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
        return kind(f"{self._prefix}_{one.metric}", one.text, labels=[one.label] if one.label else [])


class _Counted(Collector):
    def __init__(self, name: str, text: str, counts: Callable[[], Mapping[int, int]], buckets: Sequence[int]) -> None:
        self._name, self._text, self._counts, self._buckets = name, text, counts, buckets

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text)]

    def collect(self) -> Iterable[Metric]:
        counts = self._counts()
        buckets = [(str(float(most)), float(sum(n for value, n in counts.items() if value <= most))) for most in self._buckets]
        total = float(sum(counts.values()))
        yield HistogramMetricFamily(
            self._name, self._text, buckets=[*buckets, ("+Inf", total)],
            sum_value=float(sum(value * n for value, n in counts.items())),
        )  # fmt: skip
