"""Every metric that the services export, read off the services themselves; as a program it prints docs/metrics.md."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from prometheus_client.metrics_core import Metric

from towline.buffer.service import BufferService
from towline.bus.client import Bus
from towline.bus.topology import Topology
from towline.config import Settings
from towline.gateway.service import GatewayService
from towline.publisher.service import PublisherService
from towline.reward.service import RewardService
from towline.rollout_worker.service import RolloutWorkerService
from towline.runtime.metrics_catalogue import CATALOGUE
from towline.runtime.metrics_common import CommonMetrics, MeteredStore
from towline.runtime.service import Service
from towline.runtime.tracing_otlp import OtlpTracing
from towline.store.objects import open_store
from towline.trainer.service import TrainerService

SERVICES: tuple[type[Service], ...] = (
    BufferService, RolloutWorkerService, RewardService, TrainerService, PublisherService, GatewayService
)  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

Every service serves them at /metrics of its probes' port (`service.port`), in Prometheus' text format; the gateway's API has its
own at /metrics too. Names are `towline_SERVICE_NAME`; counters end in `_total`, times are in seconds, sizes in bytes, `_ratio` is
0 to 1. Beside them stand `process_*`, the process's memory, CPU time and open files.

The run and the replica stand in `towline_SERVICE_info`; whoever scrapes several runs gives each target a label `run`, by which
the alert rules of [observe/prometheus/alerts.yml](../observe/prometheus/alerts.yml) group. Not ready, and why, says /readyz.

This page is generated (`PYTHONPATH=tests .venv/bin/python -m support.exported`); a test holds it to the code.
"""


def _reward(sample: Any) -> float:
    return 0.0


@contextmanager
def made(cls: type[Service]) -> Iterator[Service]:
    """The service as its process has it before it runs, on a bus that answers nothing."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.model_validate(
            {
                "run": {"name": "r", "directory": folder}, "store": {"url": Path(folder).as_uri()}, "model": {"source": "m"},
                "prompts": {"source": "a:b"}, "sampling": {"max_tokens": 4}, "gateway": {"doors": True},
                "reward": {"function": f"{__name__}:_reward"}, "rollout": {"engine": "synthetic"},
            }
        )  # fmt: skip
        bus = MagicMock(spec=Bus)
        bus.topology, bus.connection, bus.publisher, bus.jetstream = Topology("r"), MagicMock(), MagicMock(), MagicMock()
        bus.connected = True
        service = cls(settings, bus=bus, objects=MeteredStore(open_store(settings.store)), replica="0")
        service.metrics.show_figures(service.figures, CATALOGUE.get(cls.name, ()))
        CommonMetrics(service.metrics, health=service.health, bus=bus, replica="0", run="r")
        assert isinstance(service.objects, MeteredStore)
        service.objects.show(service.metrics)
        tracing = OtlpTracing(endpoint="http://127.0.0.1:9", ratio=0.0, service="s", replica="0", run="r", timeout_seconds=0.1)
        tracing.show(service.metrics)
        yield service
        tracing.close(0.0)


def families(service: Service) -> list[Metric]:
    """Of Towline's own, in the order in which they were made."""
    return [family for family in service.metrics.registry.collect() if family.name.startswith("towline_")]


def full_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels_of(service: Service, family: Metric) -> tuple[str, ...]:
    """As far as they can be known before there is a sample."""
    maker = service.metrics.registry._names_to_collectors.get(full_name(family))
    own = getattr(maker, "_labelnames", ())
    shown = {one.metric: (one.label,) for one in CATALOGUE.get(service.name, ()) if one.label}
    return tuple(own) or shown.get(family.name.removeprefix(f"towline_{service.name}_"), ())


def names() -> dict[str, set[str]]:
    """Every series' name (a histogram's three among them) -> its labels."""
    found: dict[str, set[str]] = {}
    for cls in SERVICES:
        with made(cls) as service:
            for family in families(service):
                labels = set(labels_of(service, family))
                if family.type == "histogram":
                    found |= {
                        f"{family.name}_bucket": labels | {"le"},
                        f"{family.name}_sum": labels,
                        f"{family.name}_count": labels,
                    }
                else:
                    found[full_name(family)] = labels
    return found


def page() -> str:
    lines = [HEAD]
    common: list[str] | None = None
    for cls in SERVICES:
        with made(cls) as service:
            found = families(service)
            rows = {family.name.removeprefix(f"towline_{cls.name}_"): _row(service, family) for family in found}
        if common is None:
            with made(SERVICES[-1]) as other:
                theirs = {family.name.removeprefix(f"towline_{SERVICES[-1].name}_") for family in families(other)}
            common = [name for name in rows if name in theirs]
            lines += [
                "## Of every service\n",
                *_table([rows[name].replace(f"towline_{cls.name}_", "towline_SERVICE_") for name in common]),
            ]
        lines += [f"## {cls.name}\n", *_table([row for name, row in rows.items() if name not in common])]
    return "\n".join(lines)


def _row(service: Service, family: Metric) -> str:
    labels = ", ".join(labels_of(service, family))
    return f"| `{full_name(family)}` | {family.type} | {labels} | {family.documentation} |"


def _table(rows: list[str]) -> list[str]:
    return ["| metric | type | labels | what it says |", "|---|---|---|---|", *rows, ""]


if __name__ == "__main__":
    sys.stdout.write(page())
