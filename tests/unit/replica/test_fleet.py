"""The fleet's figures: from what replicas said, by hand where the answer is known."""

from __future__ import annotations

from typing import Any

import pytest

from towline.contract.codec import encode
from towline.contract.policy import Ack, ReplicaInfo, Served
from towline.local.status import fleet_lines
from towline.replica.fleet import Fleet, decode_fleet, fleet_of

PUBLISHED = {2: 100.0, 3: 110.0, 5: 120.0}


def info(name: str, version: int | None, **fields: Any) -> ReplicaInfo:
    defaults: dict[str, Any] = {"host": "h", "engine": "torch", "slots": 8, "busy": 0, "state": "serving", "at": 0.0}
    return ReplicaInfo(replica=name, version=version, **(defaults | fields))


def ack(name: str, *served: tuple[int, float]) -> Ack:
    """Of (version, when it was acknowledged)."""
    rows = tuple(Served(version=v, depth=v, published_at=PUBLISHED[v], at=at) for v, at in served)
    return Ack(
        replica=name, version=served[-1][0], files_digest="d", engine_digest="d", probe_max_abs_diff=None, probe_tolerance=None,
        prepare_seconds=0.1, pause_seconds=0.0, wire_bytes=1, mode="retract", at=served[-1][1], history=rows,
    )  # fmt: skip


def test_who_serves_what_and_how_far_back_the_slowest_is() -> None:
    fleet = fleet_of(
        [info("a", 5), info("b", 3), info("c", 5), info("d", None, state="preparing")],
        [ack("a", (2, 101.0), (5, 121.0)), ack("b", (2, 102.0), (3, 113.0)), ack("c", (5, 124.0))],
        now=130.0,
    )
    assert fleet.serving == {5: 2, 3: 1}
    assert list(fleet.serving) == [5, 3]
    assert (fleet.latest, fleet.slowest, fleet.slowest_behind_seconds) == (5, "b", 10.0)
    assert [member.behind_seconds for member in fleet.members] == [0.0, 10.0, 0.0, None]


def test_a_version_has_converged_when_everyone_that_was_there_serves_it_or_a_newer_one() -> None:
    fleet = fleet_of(
        [info("a", 5), info("b", 5), info("late", 5)],
        [
            ack("a", (2, 101.0), (3, 111.0), (5, 121.0)),
            ack("b", (2, 104.0), (5, 128.0)),  # skipped 3
            ack("late", (5, 129.0)),
        ],
        now=130.0,
    )
    # 2: b at 104; 3: b by way of 5, at 128; 5: late at 129.
    assert fleet.converged == 3
    assert (fleet.publish_to_all_p50_seconds, fleet.publish_to_all_p99_seconds) == (9.0, 18.0)


@pytest.mark.parametrize("subscription", ["pinned", "behind"])
def test_whoever_does_not_follow_at_once_keeps_nothing_from_converging(subscription: str) -> None:
    infos = [info("a", 3), info("b", 2, subscription=subscription)]
    fleet = fleet_of(infos, [ack("a", (2, 101.0), (3, 111.0)), ack("b", (2, 102.0))], now=130.0)
    assert fleet.converged == 2
    assert fleet.slowest == (None if subscription == "pinned" else "b")
    held_up = fleet_of([info("a", 3), info("b", 2)], [ack("a", (2, 101.0), (3, 111.0)), ack("b", (2, 102.0))], now=130.0)
    assert held_up.converged == 1


def test_replicas_that_are_gone_do_not_count_and_an_empty_fleet_has_no_figures() -> None:
    acks = [ack("a", (3, 111.0)), ack("gone", (2, 101.0))]
    fleet = fleet_of([info("a", 3)], acks, now=130.0)
    assert (fleet.serving, fleet.converged, fleet.slowest) == ({3: 1}, 1, None)
    assert fleet_of([], [], now=130.0) == Fleet()


def test_entries_of_another_release_are_left_out() -> None:
    fleet = decode_fleet({"a": encode(info("a", 3)), "b": b"\xff"}, {"a": encode(ack("a", (3, 111.0))), "b": b""}, now=130.0)
    assert [member.replica for member in fleet.members] == ["a"]


def test_status_says_it_in_a_line_and_names_what_failed() -> None:
    infos = [info("a", 5), info("b", 3, failed={4: "its digest differs"}), info("c", None, state="preparing")]
    fleet = fleet_of(infos, [ack("a", (3, 111.0), (5, 121.0)), ack("b", (3, 113.5))], now=130.0)
    assert fleet_lines(fleet) == [
        "fleet: 3 replicas: 1 on version 5 (latest), 1 on version 3; b is 10.0 s behind; "
        "from published to served by all p50 3.50 s, p99 3.50 s (1 versions)",
        "  b couldn't serve version 4: its digest differs",
    ]
    assert fleet_lines(Fleet()) == []
