"""Scenarios: what a TOML file may say, and what comes of a threshold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from towline.config import BusSettings, StoreSettings
from towline.errors import UsageError
from towline.loadtest.result import new_result, read_result
from towline.loadtest.scenario import at_addresses, load_scenario

ROOT = Path(__file__).parents[3]
SCENARIOS = sorted((ROOT / "loadtests").glob("*.toml"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_scenario_of_the_repository_can_be_read(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.name == path.stem
    assert scenario.load.thresholds or scenario.load.kind, "a scenario that can't fail says nothing"


def test_a_runs_own_file_is_a_scenario_with_its_settings() -> None:
    scenario = load_scenario(ROOT / "examples" / "demo.toml", {"load.workers": 3, "load.trainer.step_seconds": 0.25})
    assert scenario.settings.buffer.groups_per_batch == 64
    assert (scenario.load.workers, scenario.load.trainer.step_seconds) == (3, 0.25)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


def test_a_mistake_is_one_line_that_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="wrokers"):
        load_scenario(write(tmp_path, "[load]\nwrokers = 4\n"))
    with pytest.raises(UsageError, match=r"trainer\.step_seconds"):
        load_scenario(write(tmp_path, "[load.trainer]\nstep_seconds = -1\n"))
    with pytest.raises(UsageError, match="no such file"):
        load_scenario(tmp_path / "missing.toml")


def test_thresholds_fail_on_both_sides_and_where_the_metric_is_missing(tmp_path: Path) -> None:
    scenario = load_scenario(
        write(tmp_path, '[load.thresholds]\nrate = { least = 10 }\nlost = { most = 0 }\n"typo" = { most = 1 }\n')
    )
    result = new_result(scenario)
    result.metrics = {"rate": 9.0, "lost": 1.0}
    result.judge(scenario)
    assert [line.split(" ")[0].rstrip(":") for line in result.failed] == ["rate", "lost", "typo"]
    result.failed, result.metrics = [], {"rate": 10.0, "lost": 0.0, "typo": 1.0}
    result.judge(scenario)
    assert result.failed == []


def test_a_result_says_how_it_came_about_and_holds_no_secret(tmp_path: Path) -> None:
    text = '[bus]\nurl = "nats://h:1"\nuser = "u"\npassword = "hush-hush"\n[store]\nurl = "s3://b"\nsecret_key = "hush-hush"\n'
    scenario = load_scenario(write(tmp_path, text))
    result = new_result(scenario)
    result.distribution("hop.x", [0.1, 0.2, 0.3])
    result.write(tmp_path / "result-000.json")
    assert "hush-hush" not in (tmp_path / "result-000.json").read_text()
    again = read_result(tmp_path / "result-000.json")
    assert again == result
    assert again.commit
    assert again.machine["cores"] >= 1
    assert again.metrics["hop.x.p50"] == pytest.approx(0.2)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(UsageError, match="schema 99"):
        read_result(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="not a load test's result"):
        read_result(path)


def test_the_fleet_that_the_settings_name_is_the_scenarios(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, "[load]\nworkers = 7\n"))
    settings = at_addresses(scenario, BusSettings(), StoreSettings(), tmp_path, "x-1")
    assert (settings.rollout.replicas, settings.run.name) == (7, "x-1")
