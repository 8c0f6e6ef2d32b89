"""A run's result: one JSON file with everything that a reader needs to judge or to repeat it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from towline.errors import UsageError
from towline.loadtest.metric_names import counted
from towline.loadtest.scenario import Scenario

SCHEMA = 1
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
SKETCH = 200
"""Points of a distribution that are kept for its plot."""
SECRETS = ("password", "token", "secret_key", "access_key", "tenants")


@dataclass(slots=True)
class Result:
    """`metrics` are what thresholds and comparisons read: flat, numbers. Seconds and bytes unless the name says otherwise."""

    scenario: str
    kind: str
    started_at: float
    command: str
    commit: str
    machine: dict[str, Any]
    seed: int
    settings: dict[str, Any]
    load: dict[str, Any]
    warm_up_seconds: float
    measured_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    distributions: dict[str, list[float]] = field(default_factory=dict)
    """Name -> quantiles at SKETCH even steps from the least to the most."""
    series: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Chart -> columns over time or another axis, which is the first one."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """(seconds since the run began, what was done to it)."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    """The audit's."""
    failed: list[str] = field(default_factory=list)
    """Thresholds that weren't kept, and whatever else makes the load test fail."""
    schema: int = SCHEMA

    def distribution(self, name: str, values: Sequence[float], *, scale: float = 1.0) -> None:
        """Quantiles as metrics `NAME.p50` …, `NAME.mean`, `NAME.max`, `NAME.count`, and a sketch for the plot."""
        self.metrics[f"{name}.count"] = float(len(values))
        if not len(values):
            return
        array = np.sort(np.asarray(values, np.float64)) * scale
        for label, quantile in QUANTILES.items():
            self.metrics[f"{name}.{label}"] = float(np.quantile(array, quantile))
        self.metrics[f"{name}.mean"] = float(array.mean())
        self.metrics[f"{name}.max"] = float(array[-1])
        self.distributions[name] = [float(value) for value in np.quantile(array, np.linspace(0, 1, SKETCH))]

    def judge(self, scenario: Scenario) -> None:
        """Hold the metrics against the scenario's thresholds; one that wasn't measured fails too, but for a count of what never
        arose, which is 0."""
        for name, threshold in scenario.load.thresholds.items():
            if counted(name):
                self.metrics.setdefault(name, 0.0)
            value = self.metrics.get(name)
            if value is None:
                self.failed.append(f"{name}: nothing was measured for it; a result's `metrics` has what was")
            elif threshold.least is not None and not value >= threshold.least:
                self.failed.append(f"{name} = {value:.6g}, at least {threshold.least:g} is asked")
            elif threshold.most is not None and not value <= threshold.most:
                self.failed.append(f"{name} = {value:.6g}, at most {threshold.most:g} is allowed")

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1, allow_nan=False, default=str))
        temporary.replace(path)


def new_result(scenario: Scenario, kind: str | None = None) -> Result:
    return Result(
        scenario=scenario.name,
        kind=kind or scenario.load.kind,
        started_at=time.time(),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        commit=commit(),
        machine=machine(),
        seed=scenario.settings.run.seed,
        settings=without_secrets(scenario.settings.model_dump(mode="json")),
        load=scenario.load.model_dump(mode="json"),
        warm_up_seconds=scenario.load.warm_up_seconds,
    )


def read_result(path: Path) -> Result:
    try:
        tree = json.loads(path.read_text())
        if tree["schema"] != SCHEMA:
            raise UsageError(f"{path}: schema {tree['schema']}; this Towline reads {SCHEMA}", code="result_schema")
        return Result(**tree)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give a result-NNN.json, or their folder", code="result") from None
    except ValueError as error:  # JSON that ends too soon, or no JSON
        raise UsageError(f"{path}: not a load test's result, or not all of one: {error}", code="result") from None
    except (TypeError, KeyError):
        raise UsageError(f"{path}: JSON, but not a load test's result", code="result") from None


def read_results(path: Path) -> list[Result]:
    """Of a file, or of every result in a folder, in the order of their names."""
    files = sorted(path.glob("result-*.json")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path}: no result-*.json in it", code="result")
    return [read_result(file) for file in files]


def commit() -> str:
    """The checkout's, with `+` where files differ from it; `unknown` where this isn't one."""
    here = Path(__file__).parent
    try:
        text = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return text.stdout.strip()


def machine() -> dict[str, Any]:
    """What figures depend on, and how busy it was when the run began."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        model = next((line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line), model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def without_secrets(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: without_secrets(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if key not in SECRETS and value is not None
    }
