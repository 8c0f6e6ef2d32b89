"""The command that starts a server: what a CPU needs is kept from a GPU, and SGLang knows every option of both."""

from __future__ import annotations

import os
import subprocess
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from towline.config import RolloutSettings
from towline.engine.choice import make_engine
from towline.engine.sglang.command import ServerPlan, command_line, environment_of, find_python
from towline.errors import UsageError


def plan(device: str, python: str = "python", **more: Any) -> ServerPlan:
    given: dict[str, Any] = dict(
        python=python, device=device, dtype="bfloat16", threads=1, slots=8, context=512, tp=1, loader=True, deterministic=False,
        options=(), environment={}, max_total_tokens=None,
    )  # fmt: skip
    return ServerPlan(**given | more)


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_a_gpu_server_runs_without_the_cpus_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    wanted = plan("cuda:2", tp=4, options=("--mem-fraction-static", "0.7"))
    command, environment = command_line(wanted, tmp_path, "0-0", 1234), environment_of(wanted, tmp_path / "command.json")
    assert value(command, "--device") == "cuda"
    assert value(command, "--base-gpu-id") == "2"
    assert value(command, "--tensor-parallel-size") == "4"
    assert command[-2:] == ["--mem-fraction-static", "0.7"]
    assert not {"--attention-backend", "--sleep-on-idle", "--disable-overlap-schedule", "--max-total-tokens"} & set(command)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS"} & (environment.keys() - os.environ.keys())
    assert [Path(path).name for path in environment["PYTHONPATH"].split(os.pathsep)] == ["inside"]


def test_a_cpu_server_gets_them(tmp_path: Path) -> None:
    wanted = plan("cpu", tp=2, max_total_tokens=1000)
    command, environment = command_line(wanted, tmp_path, "0-0", 1234), environment_of(wanted, tmp_path / "command.json")
    assert value(command, "--attention-backend") == "torch_native"
    assert value(command, "--max-total-tokens") == "1000"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert [Path(path).name for path in environment["PYTHONPATH"].split(os.pathsep)] == ["inside", "inside_cpu"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weights": "pickle"}, "use one of auto, loader, overlay, tensors"),
        ({"weights": "tensors"}, "'tensors' is for tests on a CPU, not for 'cuda'"),
        ({"tp": 0}, "at least 1"),
        ({"python": "no-such-python"}, "no such program"),
        ({"wieghts": "auto"}, "unexpected keyword"),
    ],
)
def test_arguments_that_no_server_could_heed_are_refused(given: dict[str, Any], says: str) -> None:
    arguments = {"python": "python3"} | given
    with pytest.raises(UsageError, match=says):
        make_engine(RolloutSettings(engine="sglang", device="cuda", arguments=arguments))


def test_the_gpu_settings_of_the_design_page_are_taken() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design" / "040-sglang.md").read_text()
    block = next(part for part in page.split("\n\n") if part.startswith("    [rollout]"))
    rollout = tomllib.loads(textwrap.dedent(block))["rollout"]
    rollout["arguments"]["python"] = "python3"
    engine = make_engine(RolloutSettings(**rollout))
    assert engine.name == "sglang"
    assert engine.slots == rollout["slots"]


@pytest.mark.sglang
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_sglang_knows_every_option(tmp_path: Path, device: str) -> None:
    wanted = plan(device, find_python(""), deterministic=True, max_total_tokens=1000)
    command = command_line(wanted, tmp_path, "0-0", 1234)
    options = command[command.index("sglang.launch_server") + 1 :]
    parse = (
        "import argparse, json, sys; from sglang.srt.server_args import ServerArgs; parser = argparse.ArgumentParser(); "
        "ServerArgs.add_cli_args(parser); given = parser.parse_args(sys.argv[1:]); "
        "print(given.device, given.base_gpu_id, given.incremental_streaming_output, given.weight_version)"
    )
    # On a machine without a GPU it can only be imported as the CPU server is.
    environment = environment_of(plan("cpu"), tmp_path / "command.json")
    done = subprocess.run(
        [wanted.python, "-c", parse, *options], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kind, _, index = device.partition(":")
    assert done.stdout.split() == [kind, index or "0", "True", "0-0"]
