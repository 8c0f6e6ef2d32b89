"""The gateway under load, small: every part once, over real servers and workers; and clients alone, of a gateway by its URL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from live.gateway.conftest import Scene, scene
from towline.loadtest.campaign import conduct
from towline.loadtest.metric_names import known
from towline.loadtest.result import read_result
from towline.loadtest.scenario import Load, load_scenario

__all__ = ["scene"]
DEPLOYED = """
[run]
name = "deployed"
[load]
kind = "gateway"
prompt_tokens = 8
warm_up_seconds = 0
measure_seconds = 0.8
most_seconds = 60
[load.gateway]
clients = 3
output_tokens = 12
rounds = 1
rates = [10]
"""
SCENARIO = """
[run]
name = "gw"
steps = 100000
[sampling]
max_tokens = 256
stop_token_ids = [0]
[buffer]
group_size = 2
groups_per_batch = 2
session_groups = 1
max_staleness = 1
[rollout]
slots = 24
max_context_tokens = 2048
arguments = { mean_tokens = 12, sigma = 0.3, tokens_per_second = 200 }
[gateway]
reserved_slots = 20
chunk_tokens = 4
[gateway.tenants.greedy]
token = "of the load test alone"
concurrent = 1
[load]
kind = "gateway"
workers = 2
processes = 1
prompt_tokens = 20
warm_up_seconds = 0.5
measure_seconds = 1
most_seconds = 120
[load.trainer]
step_seconds = 0.5
model_bytes = 65536
[load.gateway]
clients = 4
output_tokens = 32
rounds = 1
rates = [10]
sessions = 2
turns = 2
claims = true
tenants = { greedy = 4, light = 1 }
idle_streams = 8
grpc = true
[load.thresholds]
"closed.errors" = { most = 0 }
"grpc.errors" = { most = 0 }
"tenants.light.refused" = { most = 0 }
"audit.violations" = { most = 0 }
"""


async def test_clients_alone_ask_a_gateway_by_its_url(scene: Scene, tmp_path: Path) -> None:
    scene.seed()
    await scene.worker(engine="synthetic", slots=8, arguments={"mean_tokens": 8, "tokens_per_second": 400.0})
    client = await scene.gateway()
    path = tmp_path / "deployed.toml"
    path.write_text(DEPLOYED)
    asked = {"load.gateway.urls": [str(client.base_url)], "load.gateway.model": scene.world.run}
    campaign = await conduct(load_scenario(path, asked), tmp_path / "out", lambda line: None)
    result = campaign.results[0]
    metrics = result.metrics
    assert campaign.failed == []
    assert [name for name in metrics if not known(name, Load.model_validate(result.load))] == [], "thresholds may name them all"
    assert metrics["closed.errors"] == metrics["rate.10.errors"] == 0
    assert metrics["rate.10.requests"] == 8
    assert metrics["closed.requests"] > 3
    assert metrics["closed.ttft_seconds.count"] + metrics["rate.10.ttft_seconds.count"] > 0
    assert metrics["closed.tokens_per_second"] > 0
    assert metrics["versions_seen"] == 1
    assert "closed.gateway_rss_bytes" not in metrics, "another machine's processes aren't seen"


@pytest.mark.slow
def test_every_part_of_a_gateways_load_is_measured_and_the_run_beside_it_is_audited(tmp_path: Path) -> None:
    scenario = tmp_path / "gw.toml"
    scenario.write_text(SCENARIO)
    command = [sys.executable, "-m", "towline.cli.main", "loadtest", str(scenario), "-o", str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["failed"] == []
    result = read_result(tmp_path / "out" / "result-000.json")
    metrics = result.metrics
    assert [name for name in metrics if not known(name, Load.model_validate(result.load))] == [], "thresholds may name them all"
    for part in ("closed", "bare", "rate.10", "sessions.turn", "grpc", "idle", "tenants.greedy", "tenants.light"):
        assert metrics[f"{part}.latency_seconds.count"] > 0, part
        assert metrics[f"{part}.latency_seconds.p50"] > 0, part
    for part in ("closed", "bare", "grpc", "idle"):
        assert metrics[f"{part}.ttft_seconds.count"] > 0, part
        assert metrics[f"{part}.itl_seconds.count"] > 0, part
    assert metrics["rate.10.requests"] == 10
    assert metrics["tenants.greedy.refused"] > 0, "one at a time, and four that ask"
    assert metrics["tenants.greedy.errors"] == 0, "a refusal is no error"
    assert metrics["idle.streams"] == metrics["idle.asked"] == 8
    assert metrics["sessions.finished"] > 0
    assert metrics["closed.gateway_cpu_seconds_per_request"] > 0
    assert metrics["closed.gateway_rss_bytes"] > 1 << 20
    assert metrics["versions_seen"] >= 1
    assert {row["system"] for row in result.tables["rounds"]} == {"closed", "bare"}
    assert "of the load test alone" not in (tmp_path / "out" / "result-000.json").read_text()
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") >= 7
    assert "Tenants, all at once" in page
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(process.info["cmdline"] or [])]
    assert left == [], "nothing is left running"
