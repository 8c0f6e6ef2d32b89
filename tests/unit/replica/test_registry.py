"""A replica's entry tells that its engine is away for a while, though its version stands."""

from __future__ import annotations

from types import SimpleNamespace

from towline.engine.synthetic import SyntheticEngine
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
