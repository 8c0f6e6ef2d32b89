"""How an SGLang server is started: its Python, its command line, its environment. Nothing of SGLang is imported here."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from towline.errors import UsageError

HOST = "127.0.0.1"
LOADER = "towline_sglang.loader.load"
CONTEXT_MARGIN = 8
"""SGLang keeps a few tokens of its context length for itself; what `max_context` promises must fit all the same."""
_INSIDE = Path(__file__).with_name("inside")
_INSIDE_CPU = Path(__file__).with_name("inside_cpu")
# Without this a killed worker would leave its server behind. Done by a Python of its own and not between fork and exec, where
# the threads that a fork leaves behind may hold any lock. 1 is PR_SET_PDEATHSIG; it outlives the exec.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
_CPU_OPTIONS = (
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule",
    "--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled", "--grammar-backend", "none",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """How a run's servers are started; the model's folder and the weights' label are each start's own."""

    python: str
    device: str
    """cpu, cuda, or cuda:N for the first of `tp` GPUs."""
    dtype: str
    threads: int
    slots: int
    context: int
    """Tokens of a sequence that the server must take, prompt and output."""
    tp: int
    loader: bool
    deterministic: bool
    options: tuple[str, ...]
    """More of `sglang.launch_server`'s options; the last one of a kind counts."""
    environment: Mapping[str, str]
    max_total_tokens: int | None


def find_python(given: str) -> str:
    """The server's Python: what is given, else the checkout's .venv-sglang, else our own where SGLang is installed in it."""
    if given:
        if found := shutil.which(given):
            return found
        raise UsageError(f"rollout.arguments.python = {given!r}: no such program", code="engine_missing")
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (candidate := folder / ".venv-sglang" / "bin" / "python").exists():
            return str(candidate)
    with contextlib.suppress(PackageNotFoundError):
        version("sglang")
        return sys.executable
    raise UsageError(
        "rollout.engine = 'sglang' finds no SGLang; run `make sglang-venv`, or give rollout.arguments.python, the Python of an "
        "environment that has it",
        code="engine_missing",
    )


def command_line(plan: ServerPlan, model: Path, label: str, port: int) -> list[str]:
    kind, _, index = plan.device.partition(":")
    options = [
        plan.python, "-I", "-S", "-c", _DIE_WITH_PARENT, "-m", "sglang.launch_server",
        "--model-path", str(model), "--dtype", plan.dtype,
        "--host", HOST, "--port", str(port), "--weight-version", label, "--skip-tokenizer-init", "--skip-server-warmup",
        "--context-length", str(plan.context + CONTEXT_MARGIN), "--max-running-requests", str(plan.slots),
        "--tensor-parallel-size", str(plan.tp), "--stream-interval", "16", "--incremental-streaming-output",
        "--device", kind, "--log-level", "warning",
    ]  # fmt: skip
    if plan.loader:
        options += ["--custom-weight-loader", LOADER]
    if plan.deterministic:
        options += ["--enable-deterministic-inference"]
    if kind == "cpu":
        options += ["--sleep-on-idle", *_CPU_OPTIONS]
    elif index:
        options += ["--base-gpu-id", index]
    if plan.max_total_tokens is not None:
        options += ["--max-total-tokens", str(plan.max_total_tokens)]
    return [*options, *plan.options]


def environment_of(plan: ServerPlan, command_file: Path) -> dict[str, str]:
    """Ours, less what would lead the server's Python into our packages."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    paths = [str(_INSIDE)]
    env |= {
        "TOWLINE_SGLANG_COMMAND": str(command_file),
        # Behaviour logprobs are those after temperature, before top-k and top-p.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if plan.device == "cpu":
        paths.append(str(_INSIDE_CPU))
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(plan.threads), "CUDA_VISIBLE_DEVICES": ""}
        if plan.tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(plan.tp))
        if plan.deterministic:
            env["TOWLINE_SGLANG_CPU_DETERMINISTIC"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(paths)
    return env | dict(plan.environment)


def options_of(given: Sequence[str] | str) -> tuple[str, ...]:
    """`rollout.arguments.options` as a list or as one line."""
    return tuple(given.split()) if isinstance(given, str) else tuple(str(option) for option in given)
