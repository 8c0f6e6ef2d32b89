"""A replica's entry tells that its engine is away for a while, though its version stands."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from towline.bus.topology import Topology
from towline.engine.synthetic import SyntheticEngine
from towline.errors import UnavailableError
from towline.replica import registry as registry_module
from towline.replica.registry import Registry
from towline.replica.states import StateMachine


class Away(SyntheticEngine):
    recovering = ""


def entry(engine, states):
    bus = SimpleNamespace(kv=lambda bucket: None)
    registry = Registry(
        bus, replica="w", engine=engine, states=states, version=lambda: 7, busy=lambda: 0, subscription="latest", failed={}
    )  # fmt: skip
    found = registry.info()
    return found.state, found.version, found.detail


def serving():
    states = StateMachine()
    for state in ("following", "preparing", "prepared", "activating", "serving"):
        states.go(state, "version 7" if state == "serving" else "")
    return states


def test_an_engine_that_is_being_started_again_takes_its_replica_out_of_service():
    engine, states = Away(slots=2), serving()
    assert entry(engine, states) == ("serving", 7, "version 7")
    engine.recovering = "its server is being started again"
    assert entry(engine, states) == ("starting", 7, "its server is being started again")
    engine.recovering = ""
    assert entry(engine, states) == ("serving", 7, "version 7")


def test_a_draining_replica_stays_so_and_other_engines_are_never_away():
    engine, states = Away(slots=2), serving()
    states.go("draining", "")
    engine.recovering = "away"
    assert entry(engine, states)[0] == "draining"
    assert entry(SyntheticEngine(slots=2), serving())[0] == "serving"


class Bucket:
    """One that can't be had for a while; then it has nothing of this name."""

    def __init__(self, failures):
        self.failures, self.entered = failures, asyncio.Event()

    async def get(self, key):
        if self.failures:
            self.failures -= 1
            raise UnavailableError("the bus isn't there")

    async def put(self, key, value):
        self.entered.set()
        return 1


async def test_a_bus_that_is_away_as_the_name_is_looked_for_is_waited_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry_module, "RENEW_SECONDS", 0.001)
    bucket = Bucket(failures=3)
    bus = SimpleNamespace(kv=lambda spec: bucket, topology=Topology("run", sites=("b",)))
    registry = Registry(
        bus, replica="w", engine=SyntheticEngine(slots=2), states=serving(), version=lambda: 7, busy=lambda: 0,
        subscription="latest", failed={},
    )  # fmt: skip
    running = asyncio.create_task(registry.run())
    entered = asyncio.create_task(bucket.entered.wait())
    await asyncio.wait([running, entered], timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert bucket.entered.is_set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
