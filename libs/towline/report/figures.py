"""The services' figures, folded over restarts: what the progress view shows and what the summary can't read from the logs.

A service counts from its own start. So the totals of each of its processes are kept, and a service's total is their sum; a
process that was killed contributes what it said last.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towline.runtime.files import write_private

RATE_SECONDS = 10.0
"""A rate is that of the last so many seconds."""
SAMPLERS = ("rollout_worker", "gateway")
"""Services that deliver trajectories."""


@dataclass(frozen=True, slots=True)
class Status:
    """One process's entry of the bucket `status`."""

    service: str
    replica: str
    pid: int
    port: int
    ready: bool
    reason: str
    at: float
    figures: dict[str, Any]


def decode_statuses(items: Mapping[str, bytes]) -> list[Status]:
    """The entries of the bucket `status`, in the order of their keys."""
    found = []
    for key in sorted(items):
        entry = json.loads(items[key])
        found.append(
            Status(
                service=entry["service"],
                replica=str(entry["replica"]),
                pid=entry["pid"],
                port=entry.get("port", 0),
                ready=entry["ready"],
                reason=entry.get("reason") or "",
                at=entry["at"],
                figures=entry.get("figures") or {},
            )
        )
    return found


class FigureBook:
    """Everything that the processes of a run have said, also before the last `towline up`; without a path it's kept nowhere."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._processes: dict[str, dict[str, Any]] = {}
        self._latest: dict[str, Status] = {}
        self._samples: deque[tuple[float, dict[str, float]]] = deque()
        self.wall_seconds = 0.0
        """Of this and earlier `towline up`s of the run, from services started to stopped."""
        self.restarts = 0
        if path is not None and path.is_file():
            saved = json.loads(path.read_text())
            self._processes, self.wall_seconds, self.restarts = saved["processes"], saved["wall_seconds"], saved["restarts"]

    def update(self, statuses: list[Status], *, now: float | None = None) -> None:
        """Take in the current entries."""
        now = time.monotonic() if now is None else now
        for status in statuses:
            self._latest[f"{status.service}.{status.replica}"] = status
            self._processes[f"{status.service}.{status.replica}.{status.pid}"] = status.figures
        totals = {name: self.sampled(name) for name in ("trajectories", "tokens")}
        self._samples.append((now, totals))
        while len(self._samples) > 2 and self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()

    def services(self) -> list[str]:
        """Every service that has spoken."""
        return sorted({status.service for status in self._latest.values()})

    def latest(self, service: str) -> list[Status]:
        """The last entry of each of the service's replicas."""
        return [status for key, status in sorted(self._latest.items()) if status.service == service]

    def one(self, service: str) -> dict[str, Any]:
        """The figures of a service's freshest replica; empty where none has spoken yet."""
        entries = self.latest(service)
        return max(entries, key=lambda status: status.at).figures if entries else {}

    def total(self, service: str, name: str) -> float:
        """A counter summed over every process that the service has had."""
        prefix = f"{service}."
        return sum(float(figures.get(name) or 0.0) for key, figures in self._processes.items() if key.startswith(prefix))

    def sampled(self, name: str) -> float:
        """`trajectories` or `tokens`: the workers', and those of sessions, which gateways finish."""
        return sum(self.total(service, name) for service in SAMPLERS)

    def rate(self, name: str) -> float:
        """How fast the sampled `trajectories` or `tokens` grow, per second."""
        if len(self._samples) < 2:
            return 0.0
        (start, first), (end, last) = self._samples[0], self._samples[-1]
        return max(last[name] - first[name], 0.0) / (end - start) if end > start else 0.0

    def save(self) -> None:
        if self._path is None:
            return
        write_private(
            self._path, json.dumps({"processes": self._processes, "wall_seconds": self.wall_seconds, "restarts": self.restarts})
        )
