"""python -m loadtests.queues.ends: one end of a hop through another system's queue, or the load test's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from towline.loadtest import systems
from towline.loadtest.ends import Plan, Sink, Source, as_program

OTHERS = {
    "redis": ("redis_ends", "RedisSource", "RedisSink"),
    "ray": ("ray_ends", "RaySource", "RaySink"),
    "transferqueue": ("transfer_ends", "TransferQueueSource", "TransferQueueSink"),
    "zmq": ("zmq_ends", "ZmqSource", "ZmqSink"),
}
"""System -> module, its source, its sink. Imported when it's their turn: an end loads no other system."""


def source_of(plan: Plan) -> Source:
    return _made(plan, 1, systems.source_of)


def sink_of(plan: Plan) -> Sink:
    return _made(plan, 2, systems.sink_of)


def _made(plan: Plan, which: int, own: Callable[[Plan], Any]) -> Any:
    if plan.system not in OTHERS:
        return own(plan)
    names = OTHERS[plan.system]
    return getattr(import_module(f"loadtests.queues.{names[0]}"), names[which])(plan)


if __name__ == "__main__":
    as_program(source_of, sink_of)
