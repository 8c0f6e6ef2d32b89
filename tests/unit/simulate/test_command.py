"""`towline simulate --against`: what it says, and its exit status. The load tests are simulations, written as results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from towline.loadtest.scenario import load_scenario
from towline.simulate.outcome import simulate

HOPS = "[simulate]\ntask_seconds = 0.01\n"
SCENARIO = """
[run]
steps = 20
[buffer]
group_size = 4
groups_per_batch = 4
max_staleness = 1
[rollout]
arguments = { mean_tokens = 100, sigma = 0.5, tokens_per_second = 100 }
[load]
workers = 8
warm_up_seconds = 3
[load.trainer]
step_seconds = 0.3
"""


def towline(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", "simulate", "s.toml", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With results of seeds 1 to 3 in runs/, and those of versions that take two seconds more in late/."""
    folder = tmp_path_factory.mktemp("simulate")
    (folder / "s.toml").write_text(SCENARIO + HOPS)
    (folder / "hopless").mkdir()
    (folder / "hopless" / "s.toml").write_text(SCENARIO)
    for name, more in (("runs", {}), ("late", {"simulate.publish_seconds": 2.2})):
        scenario = load_scenario(folder / "s.toml", more)
        for seed in (1, 2, 3):
            simulate(scenario, seed=seed).write(folder / name / f"result-{seed:03d}.json")
    return folder


def test_a_comparison_says_how_sure_it_is(folder: Path) -> None:
    done = towline("--against", "runs", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("off by 0.0% +- 0.0%: surely within") == 5
    done = towline("--against", "late", cwd=folder)
    assert done.returncode == 1
    assert "surely off" in done.stdout
    assert done.stderr.startswith("simulation_off: ")
    assert "off by more than 10%\n" in done.stderr, "which is no noise"


def test_of_one_result_the_margin_comes_from_other_seeds(folder: Path) -> None:
    answers = {name: json.loads(towline("--against", where, "--json", cwd=folder).stdout) for name, where in (
        ("one", "runs/result-002.json"), ("three", "runs"))}  # fmt: skip
    assert {metric for metric, *_ in answers["one"]["checks"]} == set(answers["one"]["margins"])
    assert all(off == 0.0 for *_, off in answers["one"]["checks"]), "the seed is the result's"
    assert answers["one"]["margins"]["batches_per_second"] > 0.02
    assert answers["three"]["margins"]["batches_per_second"] == 0.0


def test_what_noise_may_explain_is_told_as_such(folder: Path) -> None:
    """A bound that the difference is beyond, but not surely: by a margin of one result."""
    done = towline("--against", "runs/result-001.json", "--set", "run.seed=9", "--set", "simulate.publish_seconds=0.3",
                   "--within", "0.01", cwd=folder)  # fmt: skip
    assert done.returncode == 1
    assert "noise may decide" in done.stdout
    assert "which may be noise: compare with several results" in done.stderr


def test_hops_are_the_results_own_where_nothing_else_says_them(folder: Path) -> None:
    tree = json.loads((folder / "runs" / "result-001.json").read_text())
    tree["metrics"] |= {"trainer.publish_seconds": 3.2, "hop.task_to_pulled.p50": 0.01}
    (folder / "slow.json").write_text(json.dumps(tree))
    (said, *_) = json.loads(towline("--against", "../slow.json", "--json", cwd=folder / "hopless").stdout)["checks"]
    assert said[1] < 0.8 * said[2], "versions that take three seconds hold it up"
    (said, *_) = json.loads(towline("--against", "slow.json", "--json", cwd=folder).stdout)["checks"]
    assert said[1] == said[2]


@pytest.mark.parametrize("option", [("--seed", "3"), ("--until", "9")])
def test_what_the_result_decides_cant_be_given(folder: Path, option: tuple[str, str]) -> None:
    done = towline("--against", "runs", *option, cwd=folder)
    assert done.returncode == 2
    assert "leave --seed and --until out" in done.stderr
    assert "Traceback" not in done.stderr
