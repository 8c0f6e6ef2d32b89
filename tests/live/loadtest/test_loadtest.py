"""`towline loadtest` as it's used: a whole run under synthetic workers, its result, its verdict; and one hop against nats-py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from html import escape
from pathlib import Path

import psutil

from support.waiting import until
from towline.loadtest.metric_names import known
from towline.loadtest.result import read_result
from towline.loadtest.scenario import Load

RUN = """
[run]
name = "lt"
steps = 8
[sampling]
max_tokens = 64
stop_token_ids = [0]
[buffer]
group_size = 2
groups_per_batch = 4
max_staleness = 1
[rollout]
slots = 4
arguments = { mean_tokens = 10, sigma = 0.3, tokens_per_second = 200 }
[load]
workers = 6
processes = 1
warm_up_seconds = 0
most_seconds = 150
[load.trainer]
step_seconds = 0.6
model_bytes = 65536
[load.thresholds]
"depth_reached" = { least = 8 }
"over_bound_rows" = { most = 0 }
"weights.replicas_acknowledged" = { least = 7 }
"""
HOP = """
[run]
name = "hop"
[load]
kind = "transport"
payload_bytes = [4096]
window = 16
messages = 200
rounds = 1
"""
PROGRAMS = ("loadtest.ends", "loadtest.guard", "nats-server.conf")
"""What a hop starts, by what stands in the command line."""


def loadtest(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(text)
    command = [sys.executable, "-m", "towline.cli.main", "loadtest", str(scenario), "-o", str(tmp_path / "out"), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_run_under_load_is_audited_and_a_threshold_that_isnt_kept_fails_it(tmp_path: Path) -> None:
    done = loadtest(tmp_path, RUN)
    assert done.returncode == 1, done.stderr[-2000:]
    # Six workers were started, seven were asked for: the one thing that fails.
    assert "weights.replicas_acknowledged = 6, at least 7" in done.stderr
    found = json.loads(done.stdout)
    assert len(found["failed"]) == 1
    result = read_result(tmp_path / "out" / "result-000.json")
    metrics = result.metrics
    assert result.violations == []
    assert metrics["audit.rows_checked"] == 8 * 2 * 4
    assert metrics["weights.replicas_acknowledged"] == 6
    assert metrics["hop.generate.count"] > 0
    assert metrics["ttft_seconds.count"] > 0
    assert metrics["goodput_tokens_per_second"] > 0
    assert [name for name in metrics if not known(name, Load.model_validate(result.load))] == [], "thresholds may name them all"
    report = (tmp_path / "out" / "report.html").read_text()
    for title in ("Percentiles of each hop", "Flow", "A version's way, stacked", "Version propagation", "TTFT, ITL and TPOT"):
        assert f"<h3>{escape(title)}</h3>" in report
    assert "Not kept: weights.replicas_acknowledged = 6" in report
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(process.info["cmdline"] or [])]
    assert left == [], "nothing is left running"


async def test_a_hop_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(HOP.replace("messages = 200", "messages = 500000"))
    command = [sys.executable, "-m", "towline.cli.main", "loadtest", str(scenario), "-o", str(tmp_path / "out")]
    hop = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL)
    started: dict[str, psutil.Process] = {}

    def all_started() -> bool:
        for process in [*psutil.Process(hop.pid).children(recursive=True), *servers_in(tmp_path)]:
            with contextlib.suppress(psutil.Error):
                text = " ".join(process.cmdline())
                started.update({name: process for name in PROGRAMS if name in text})
        return len(started) == len(PROGRAMS)

    await until(all_started, 120)
    hop.kill()
    await hop.wait()
    await until(lambda: not any(map(is_alive, started.values())))
    await until(lambda: servers_in(tmp_path) == [])


def servers_in(folder: Path) -> list[psutil.Process]:
    """Servers whose configuration lies there."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(part.startswith(f"{folder}/") for part in process.info["cmdline"] or []) and "-c" in process.info["cmdline"]
    ]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_hop_is_measured_beside_nats_py_and_every_message_arrives_once(tmp_path: Path) -> None:
    done = loadtest(tmp_path, HOP)
    assert done.returncode == 0, done.stderr[-2000:]
    result = read_result(tmp_path / "out" / "result-000.json")
    metrics = result.metrics
    assert [name for name in metrics if not known(name, Load.model_validate(result.load))] == [], "thresholds may name them all"
    for system in ("towline", "nats"):
        assert metrics[f"{system}.4096.latency_seconds.count"] == 200
        assert metrics[f"{system}.4096.twice"] == 0
        assert metrics[f"{system}.4096.messages_per_second"] > 0
    assert metrics["towline.4096.share_of_nats"] > 0
