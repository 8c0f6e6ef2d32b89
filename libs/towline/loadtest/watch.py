"""What a run's processes say while it runs, once a second: the series of a result, and the lines of its progress."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from towline.bus.client import Bus
from towline.bus.topology import CONTROL, OUTCOME, STATUS, TRAJECTORY, ConsumerSpec
from towline.bus.wire import ApiError
from towline.contract.task import TRAIN
from towline.errors import TowlineError
from towline.report.figures import Status, decode_statuses

LOOK_SECONDS = 2.0


@dataclass(slots=True)
class Looks:
    """One row a look; columns have one length. `at` is Unix seconds."""

    rows: list[dict[str, float]] = field(default_factory=list)
    statuses: list[Status] = field(default_factory=list)
    lane: dict[str, Any] = field(default_factory=dict)
    """The task lane's consumer as it was seen last."""
    timings: dict[str, list[float]] = field(default_factory=dict)

    def columns(self, since: float) -> dict[str, list[float]]:
        names = sorted({name for row in self.rows for name in row} - {"at"})
        return {"seconds": [row["at"] - since for row in self.rows]} | {
            name: [row.get(name, 0.0) for row in self.rows] for name in names
        }

    def figure(self, service: str, name: str) -> float:
        return sum(float(one.figures.get(name) or 0.0) for one in self.statuses if one.service == service)


class Watcher:
    """Looks at a run; whatever can't be had at the moment is left out of that look."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.looks = Looks()
        self.serving = asyncio.Event()
        """Set once a worker serves."""
        self._timed: set[tuple[str, float]] = set()

    async def look(self, pids: dict[str, int]) -> dict[str, float]:
        """`pids`: process -> pid, of those on this machine."""
        bus, looks = self._bus, self.looks
        row: dict[str, float] = {"at": time.time()}
        with contextlib.suppress(TowlineError, TimeoutError):
            statuses = decode_statuses(await bus.kv(STATUS).items())
            alive = set(pids.values())
            looks.statuses = [one for one in statuses if not alive or one.pid in alive]
            self._take(row)
            for spec, name in ((CONTROL, "control"), (TRAJECTORY, "trajectory"), (OUTCOME, "outcome")):
                state = await bus.stream_state(spec)
                row[f"{name}.messages"], row[f"{name}.bytes"] = float(state.last_sequence), float(state.bytes)
            lane = await self._consumer(bus.topology.lane_consumer(TRAIN, 1))
            reward = await self._consumer(bus.topology.reward_consumer())
            for info, name in ((lane, "tasks"), (reward, "rewards")):
                row[f"{name}.waiting"] = float(info.get("num_pending", 0))
                row[f"{name}.in_hand"] = float(info.get("num_ack_pending", 0))
            looks.lane = lane or looks.lane
        for process, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                row[f"rss.{process}"] = float(psutil.Process(pid).memory_info().rss)
        looks.rows.append(row)
        if row.get("workers.serving"):
            self.serving.set()
        return row

    async def _consumer(self, spec: ConsumerSpec) -> dict[str, Any]:
        with contextlib.suppress(ApiError):
            return await self._bus.jetstream.call("look at a consumer", f"CONSUMER.INFO.{spec.stream}.{spec.durable}")
        return {}

    def _take(self, row: dict[str, float]) -> None:
        looks = self.looks
        for name in ("trajectories", "tokens", "busy", "slots", "workers", "activations"):
            row[f"workers.{name}"] = looks.figure("rollout_worker", name)
        serving = [one.figures.get("serving") or {} for one in looks.statuses if one.service == "rollout_worker"]
        row["workers.serving"] = float(sum(count for part in serving for count in part.values()))
        for name in (
            "idle_seconds",
            "train_seconds",
            "snapshot_seconds",
            "commit_seconds",
            "versions",
            "batches",
            "depth",
            "tokens",
        ):
            row[f"trainer.{name}"] = looks.figure("trainer", name)
        for name in ("open_groups", "complete_groups", "admitted", "trained"):
            row[f"buffer.{name}"] = looks.figure("buffer", name)
        for one in looks.statuses:
            timings = one.figures.get("timings") or {}
            for name, values in timings.items():
                kept = looks.timings.setdefault(name, [])
                for value in values:
                    if (name, value) not in self._timed:
                        self._timed.add((name, value))
                        kept.append(value)
