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


def test_thresholds_fail_on_both_sides_and_where_nothing_was_measured(tmp_path: Path) -> None:
    text = "samples_per_second = { least = 10 }\nepochs = { most = 1 }\n"
    scenario = load_scenario(write(tmp_path, f'[load.thresholds]\n{text}"ttft_seconds.p99" = {{ most = 1 }}\n'))
    result = new_result(scenario)
    result.metrics = {"samples_per_second": 9.0, "epochs": 2.0}
    result.judge(scenario)
    assert [line.split(" ")[0].rstrip(":") for line in result.failed] == ["samples_per_second", "epochs", "ttft_seconds.p99"]
    result.failed, result.metrics = [], {"samples_per_second": 10.0, "epochs": 1.0, "ttft_seconds.p99": 1.0}
    result.judge(scenario)
    assert result.failed == []


def test_a_count_of_what_never_arose_is_none(tmp_path: Path) -> None:
    names = ("dropped.stale", "errors.failed_attempts.verify")
    for bound, kept in (("most = 0", True), ("least = 1", False)):
        scenario = load_scenario(
            write(tmp_path, "[load.thresholds]\n" + "".join(f'"{name}" = {{ {bound} }}\n' for name in names))
        )
        result = new_result(scenario)
        result.judge(scenario)
        assert len(result.failed) == (0 if kept else 2)
        assert [result.metrics[name] for name in names] == [0, 0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"over_bund_rows" = { most = 0 }', "is it over_bound_rows"),
        ('"samples_per_second.p50" = { least = 1 }', "no such metric"),
        ('"ttft_seconds.p98" = { most = 1 }', r"ttft_seconds\.p9"),
        ('"towline.65536.twice" = { most = 0 }', "kind run has no such metric"),
        ("epochs = { }", "give least, most or both"),
        ("epochs = { least = 2, most = 1 }", "nothing can keep to it"),
    ],
)
def test_a_threshold_that_says_nothing_of_this_load_is_refused_before_it_runs(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_scenario(write(tmp_path, f"[load.thresholds]\n{text}\n"))


def test_names_with_parts_of_the_scenarios_own_are_known_where_it_has_the_part(tmp_path: Path) -> None:
    hop = '[load]\nkind = "transport"\npayload_bytes = [4096]\nrates = [500]\n[load.thresholds]\n'
    load_scenario(
        write(tmp_path, f'{hop}"towline.4096.twice" = {{ most = 0 }}\n"rate.500.latency_seconds.p99" = {{ most = 1 }}\n')
    )
    for name in ("towline.4097.twice", "rate.501.achieved_per_second", "redis.4096.twice"):
        with pytest.raises(UsageError, match="kind transport has no such metric"):
            load_scenario(write(tmp_path, f'{hop}"{name}" = {{ most = 0 }}\n'))
    gate = '[load]\nkind = "gateway"\n[load.gateway]\ntenants = { light = 1 }\n[load.thresholds]\n'
    load_scenario(
        write(tmp_path, f'{gate}"tenants.light.errors.timeout" = {{ most = 0 }}\n"audit.violations" = {{ most = 0 }}\n')
    )
    with pytest.raises(UsageError, match=r"tenants\.light\.errors"):
        load_scenario(write(tmp_path, f'{gate}"tenants.lite.errors" = {{ most = 0 }}\n'))


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
    for other in ("[]", "{}", "3", '{"schema": 1}', '{"a": 1}', "<html>", ""):
        path.write_text(other)
        with pytest.raises(UsageError, match="not a load test's result"):
            read_result(path)


def test_a_table_that_is_none_is_named(tmp_path: Path) -> None:
    for text, says in (
        ("load = 3\n", "load: must be a table"),
        ("run = 3\n", "run: must be a table"),
        ("prompts = []\n", "prompts"),
    ):
        with pytest.raises(UsageError, match=says):
            load_scenario(write(tmp_path, text))


def test_the_fleet_that_the_settings_name_is_the_scenarios(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path, "[load]\nworkers = 7\n"))
    settings = at_addresses(scenario, BusSettings(), StoreSettings(), tmp_path, "x-1")
    assert (settings.rollout.replicas, settings.run.name) == (7, "x-1")
