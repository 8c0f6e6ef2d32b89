"""`towline up` from end to end: every service a real process, a real nats-server, the demo's model and task."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from towline.local.run_directory import RunDirectory

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"
SMALL = (
    "--set", "eval.prompts=16", "--set", "eval.every=2", "--set", "buffer.groups_per_batch=4",
    "--set", "trainer.checkpoint_every=1", "--set", "model.arguments={layers = 1, hidden = 32, warm_up_steps = 5}",
)  # fmt: skip
LIMIT_SECONDS = 240.0


def towline(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


def start_up(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "towline.cli.main", "up", str(DEMO), *SMALL, *arguments]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def processes_of(directory: RunDirectory) -> list[str]:
    """Command lines that name the run's folder, whoever started them."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(directory.path) in line and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(line)
    return found


@pytest.fixture
def directory(tmp_path):
    """The run `small` of the working directory tmp_path; whatever a failed test left is ended."""
    directory = RunDirectory(tmp_path / "runs" / "small")
    yield directory
    if processes_of(directory):
        towline(tmp_path, "down", "small")


def test_a_run_is_interrupted_goes_on_and_ends_with_a_summary(tmp_path, directory):
    arguments = ("--run", "small", "--store", (tmp_path / "store").as_uri(), "--steps", "14")
    up = start_up(tmp_path, *arguments)

    def depth() -> int:
        if not directory.exists:
            return 0
        done = towline(tmp_path, "status", "small", "--json")
        progress = json.loads(done.stdout)["progress"] if done.returncode == 0 else None
        return progress["depth"] if progress else 0

    until(lambda: depth() >= 1 or up.poll() is not None, "the run never got to depth 1")
    up.send_signal(signal.SIGINT)
    out, err = up.communicate(timeout=60)
    assert up.returncode == 128 + signal.SIGINT, out + err
    assert "goes on from here" in out
    assert processes_of(directory) == []
    assert not directory.summary_path.exists()

    up = start_up(tmp_path, *arguments, "--json")
    out, err = up.communicate(timeout=LIMIT_SECONDS)
    assert up.returncode == 0, out + err
    answer = json.loads(out)
    assert answer["audit"]["clean"]
    assert answer["audit"]["staleness_max"] <= 2
    summary = answer["summary"]
    assert json.loads(directory.summary_path.read_text()) == summary
    samples = summary["samples"]
    assert summary["steps"] == 14
    assert samples["trained"] == 14 * 4 * 8
    assert samples["admitted"] == samples["trained"] + samples["evaluated"] + sum(samples["dropped"].values()) + samples["open"]
    assert summary["reward_first"] is not None
    assert min(summary["delta"].values()) > 0
    assert min(summary["phase_seconds"].values()) > 0
    assert processes_of(directory) == []

    # From another shell, with everything stopped.
    done = towline(tmp_path, "audit", "small", "--json")
    assert (done.returncode, json.loads(done.stdout)["clean"]) == (0, True)
    versions = json.loads(towline(tmp_path, "versions", "list", "small", "--json").stdout)
    assert versions[-1]["depth"] == 14
    assert towline(tmp_path, "versions", "verify", "small").returncode == 0
    newest = json.loads(towline(tmp_path, "trajectories", "list", "small", "--last", "1", "--json").stdout)
    assert newest["reward"] is not None
    shown = towline(tmp_path, "trajectories", "show", "small", f"{newest['group']}.{newest['sample']}")
    assert "response" in shown.stdout
    assert [run["state"] for run in json.loads(towline(tmp_path, "run", "list", "--json").stdout)] == ["finished"]
    again = towline(tmp_path, "up", str(DEMO), *SMALL, *arguments)
    assert "has ended already" in again.stdout
    assert processes_of(directory) == []


MY_TASK = '''
from towline.contract.task import PromptRef
from towline.environment.base import Step
from towline.environment.prompts import Prompt
from towline.environment.single_turn import SingleTurn


class Prompts:
    """Text prompts, by the model's own tokenizer."""

    def __init__(self, tokenizer, seed, first):
        self.tokenizer, self.first = tokenizer, first

    def __len__(self):
        return 10

    def get(self, epoch, position):
        text = f"{self.first}{position}{epoch % 10}>"
        return Prompt(tokens=self.tokenizer.encode(text), ref=PromptRef("mine", epoch, position), reference={"prompt": text})


class Hinting(SingleTurn):
    """Two turns: after the first the environment says a digit."""

    turns = 0

    def step(self, tokens, finish):
        self.turns += 1
        return Step(tokens=[4], done=False) if self.turns == 1 else Step(done=True)


class Ranked:
    """Scope group: the share of the group's samples that wrote fewer different digits."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, group):
        assert all(sample.prompt == sample.reference["prompt"] for sample in group), group[0].prompt
        different = [len(set(sample.text)) for sample in group]
        return [self.scale * sum(other < own for other in different) / len(group) for own in different]
'''
MINE = """
[run]
name = "mine"
[model]
factory = "sort_digits:build_model"
arguments = { layers = 1, hidden = 32, warm_up_steps = 5 }
[prompts]
source = "my_task:Prompts"
arguments = { first = 7 }
environment = "my_task:Hinting"
[sampling]
max_tokens = 6
[buffer]
group_size = 4
groups_per_batch = 4
max_staleness = 0
[eval]
every = 0
[rollout]
slots = 16
replicas = 2
[reward]
function = "my_task:Ranked"
scope = "group"
arguments = { scale = 2.0 }
"""


def test_two_runs_of_somebody_elses_code_share_a_bus_and_a_bucket(tmp_path, bus_settings, s3_settings):
    (tmp_path / "my_task.py").write_text(MY_TASK)
    (tmp_path / "mine.toml").write_text(MINE)
    shutil.copytree(DEMO.parent / "sort_digits", tmp_path / "sort_digits", ignore=shutil.ignore_patterns("__pycache__"))
    settings = {
        "bus.url": bus_settings.url,
        "bus.budget_bytes": bus_settings.budget_bytes,
        "store.endpoint": s3_settings.endpoint,
        "store.access_key": s3_settings.access_key,
        "store.secret_key": s3_settings.secret_key.get_secret_value(),
    }
    shared = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    shared += ["--store", s3_settings.url, "--steps", "2", "--json"]
    command = [sys.executable, "-m", "towline.cli.main", "up", "mine.toml", *shared, "--run"]
    ups = {
        name: subprocess.Popen([*command, name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two")
    }
    for name, up in ups.items():
        out, err = up.communicate(timeout=LIMIT_SECONDS)
        assert up.returncode == 0, out + err
        answer = json.loads(out)
        assert (answer["summary"]["run"], answer["summary"]["steps"], answer["audit"]["clean"]) == (name, 2, True)
        assert answer["audit"]["staleness_max"] == 0
        assert answer["summary"]["samples"]["trained"] == 2 * 4 * 4
        directory = RunDirectory(tmp_path / "runs" / name)
        assert not (directory.path / "nats").exists()
        assert processes_of(directory) == []


def test_a_killed_up_leaves_nothing_and_down_says_so(tmp_path, directory):
    up = start_up(tmp_path, "--run", "small", "--store", (tmp_path / "store").as_uri(), "--steps", "50")
    until(lambda: len(processes_of(directory)) >= 6 or up.poll() is not None, "the services never started")
    up.kill()
    up.communicate(timeout=60)
    until(lambda: processes_of(directory) == [], "the guard left something")
    done = towline(tmp_path, "down", "small")
    assert (done.returncode, done.stdout.strip()) == (0, "run small: nothing was running")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--set", "bus.url=nats://127.0.0.1:1", "--set", "bus.connect_timeout_seconds=1"), 1, "bus_unreachable: the bus at "),
        (("--set", "reward.function=sort_digits:rewrad"), 2, "has no 'rewrad'"),
        (("--set", "prompts.source=nowhere:prompts"), 2, "import: prompts.source = 'nowhere:prompts': no module 'nowhere'"),
        (("--set", "model.arguments={layres = 2}"), 2, "model_factory: model.factory = 'sort_digits:build_model'"),
    ],
)  # fmt: skip
def test_a_faulty_run_is_one_line_and_leaves_nothing(tmp_path, directory, nats_url, arguments, code, says):
    store = ("--store", (tmp_path / "store").as_uri(), "--run", "small")
    done = towline(tmp_path, "up", str(DEMO), "--set", f"bus.url={nats_url}", *store, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert processes_of(directory) == []


def test_a_missing_model_is_one_line(tmp_path, directory, nats_url):
    shutil.copytree(DEMO.parent, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    toml = tmp_path / "mine" / "demo.toml"
    lines = [line for line in toml.read_text().splitlines() if not line.startswith("arguments = { layers")]
    toml.write_text("\n".join('source = "no/such/folder"' if line.startswith("factory") else line for line in lines))
    store = (tmp_path / "store").as_uri()
    done = towline(tmp_path, "up", str(toml), "--set", f"bus.url={nats_url}", "--store", store, "--run", "small")
    assert (done.returncode, done.stderr) == (2, "model_missing: model.source = 'no/such/folder': no such folder\n")
    assert processes_of(directory) == []


def test_a_wrong_store_key_is_one_line(tmp_path, directory, s3_settings):
    settings = {"access_key": "nobody", "secret_key": "wrong", "endpoint": s3_settings.endpoint}
    wrong = [part for key, value in settings.items() for part in ("--set", f"store.{key}={value}")]
    done = towline(tmp_path, "up", str(DEMO), "--run", "small", "--store", s3_settings.url, *wrong)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "S3 keys" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert processes_of(directory) == []
