"""What the dashboard's panels are made of: a panel, and the queries over a run's metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUN = 'run=~"$run"'
WINDOW = "$__rate_interval"


@dataclass
class Panel:
    """`queries`: (expression, legend)."""

    title: str
    queries: list[tuple[str, str]]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    extra: dict[str, Any] = field(default_factory=dict)


def rate(metric: str, by: str = "", more: str = "") -> str:
    selector = f"{{{RUN}{', ' + more if more else ''}}}"
    return f"sum by (run{', ' + by if by else ''}) (rate({metric}{selector}[{WINDOW}]))"


def any_rate(name: str, by: str = "") -> str:
    """Of a metric that every service has."""
    return f'sum by (run{", " + by if by else ""}) (rate({{__name__=~"towline_.+_{name}", {RUN}}}[{WINDOW}]))'


def now(metric: str, by: str = "", how: str = "max", more: str = "") -> str:
    return f"{how} by (run{', ' + by if by else ''}) ({metric}{{{RUN}{', ' + more if more else ''}}})"


def quantile(q: float, metric: str, by: str = "") -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', ', '.join(filter(None, ['le', by])))})"


def both(metric: str, by: str = "") -> list[tuple[str, str]]:
    legend = f" {{{{{by}}}}}" if by else ""
    return [(quantile(0.5, metric, by), f"p50{legend}"), (quantile(0.99, metric, by), f"p99{legend}")]
