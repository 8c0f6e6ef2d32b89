"""The screen of `towline top`, drawn from what the bus says."""

from __future__ import annotations

from rich.console import Console

from towline.bus.client import StreamState
from towline.contract.policy import Ack, ReplicaInfo
from towline.local.top import MOST_REPLICAS, Look, Screen
from towline.report.figures import FigureBook, Status


def replica(name: str, version: int | None, state: str = "serving", detail: str = "") -> ReplicaInfo:
    return ReplicaInfo(
        replica=name, host="h", engine="torch", slots=8, busy=3, state=state, version=version, detail=detail, at=1.0
    )  # fmt: skip


def ack(name: str) -> Ack:
    return Ack(
        replica=name, version=7, files_digest="d", engine_digest=None, probe_max_abs_diff=2e-6, probe_tolerance=1e-3,
        prepare_seconds=0.25, pause_seconds=0.0125, wire_bytes=10, mode="retract", at=1.0,
    )  # fmt: skip


def drawn(tmp_path, replicas, dead: int = 0) -> str:
    buffer = {
        "depth": 5, "open": 64, "open_groups": 8, "complete_groups": 2, "dropped": {"stale": 16}, "state": "no_trainer: start it",
        "staleness": {"mean": 1.25, "p99": 2, "max": 2}, "evals": [[0, 0, 0.25], [4, 4, 0.5]],
    }  # fmt: skip
    statuses = [
        Status("buffer", "0", 1, 9, False, "no_trainer: start it", 95.0, buffer),
        Status("publisher", "0", 2, 9, True, "", 99.0, {"head": 7}),
    ]
    streams = {"CONTROL": StreamState("", 1, 9, 9, 50, 100), "DEAD": StreamState("", 1, dead, dead, 0, 100)}
    look = Look(100.0, statuses, replicas, {"w1": ack("w1")}, streams)
    console = Console(width=140, record=True, file=(tmp_path / "screen").open("w"))
    console.print(Screen("r", 10, 2, FigureBook(tmp_path / "figures.json")).draw(look))
    return console.export_text()


def test_the_fleet_is_shown_with_who_is_behind_first(tmp_path):
    text = drawn(tmp_path, [replica("w1", 7), replica("w2", 5), replica("w3", 7), replica("w4", None, "failed", "probe: off")])
    assert "head 7; replicas: 2 on 7, 1 on 5" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("w")]
    assert [row[0] for row in rows] == ["w4", "w2", "w1", "w3"]
    assert rows[0][3:7] == ["failed", "probe:", "off", "-"]
    assert rows[2][4:] == ["7", "3/8", "250", "ms", "12", "ms", "2.0e-06"]


def test_state_drops_staleness_and_services_are_shown(tmp_path):
    text = drawn(tmp_path, [])
    assert "step              5 of 10" in text
    assert "no_trainer: start it" in text
    assert "64 open in 8 groups, 2 complete; dropped: 16 stale" in text
    assert "1.25 mean, 2 p99, 2 max, 2 allowed" in text
    assert "none serves" in text
    assert "5 s ago" in text
    assert [line.split() for line in text.splitlines() if line.startswith("CONTROL")] == [["CONTROL", "9", "50", "B", "50%"]]


def test_a_large_fleet_is_counted(tmp_path):
    text = drawn(tmp_path, [replica(f"w{index:03}", 7) for index in range(MOST_REPLICAS + 5)])
    assert "… and 5 more" in text
    assert text.count("serving") == MOST_REPLICAS
