"""What all attempts of one worker share, and what they count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from towline.bus.client import Bus
from towline.config import Settings
from towline.engine.base import Engine
from towline.environment.base import Environment
from towline.replica.control import ControlFeed
from towline.replica.replica import Replica
from towline.rollout_worker.pace import Pace
from towline.rollout_worker.partials import PartialFigures
from towline.rollout_worker.signal import Signal


@dataclass(slots=True)
class WorkerFigures:
    """Totals since the start."""

    trajectories: int = 0
    tokens: int = 0
    """Policy tokens of delivered trajectories."""
    superseded: int = 0
    cancelled: int = 0
    handed_over: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    partials: PartialFigures = field(default_factory=PartialFigures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all attempts of a worker share. `change` is told when the served version changes or the LOG grows."""

    bus: Bus
    settings: Settings
    engine: Engine
    replica: Replica
    feed: ControlFeed
    environment: Callable[[str], Awaitable[Environment]]
    change: Signal
    figures: WorkerFigures
    pace: Pace
    busy: Callable[[], int]
    """How many slots are taken, by attempts and by requests."""
    reserved: Callable[[], int] = lambda: 0
    """Slots that requests have, or that are kept for them."""
    freed: Callable[[], None] = lambda: None
    """Called when an attempt has ended."""
    suspects: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a task runs that has been begun SUSPECT_STARTS times."""
