"""What must be right before a run's services start, checked where it may cost memory: in a process of its own.

Every import path is looked up, the base model is found or made by `model.factory`. The process's standard output ends with a
line of JSON: what was found, or the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from towline.config import ModelSettings, Settings, import_object, load_settings
from towline.errors import TowlineError, UsageError
from towline.local.run_directory import RunDirectory
from towline.local.services import service_environment
from towline.local.toml import settings_toml
from towline.runtime.files import write_private


@dataclass(frozen=True, slots=True)
class Preflight:
    """What it found: `note` says how the model came about, "" where it was there."""

    note: str


async def preflight(directory: RunDirectory, source: Path, settings: Settings, *, model: bool, threads: int = 2) -> Preflight:
    """Run the checks on `settings`, with `model` those of the base model, else the others. Raises the `TowlineError` that
    they end with.

    The settings are handed over in a file of their own: `settings.toml` may still hold the addresses of what ran before.
    """
    write_private(directory.preflight_path, settings_toml(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.local.preflight", "--config", str(directory.preflight_path),
        *(["--model"] if model else []),
        env=service_environment(source, threads), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    log = directory.log_path("preflight")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(out + err)
    try:
        answer = json.loads((out.decode(errors="replace").strip().splitlines() or [""])[-1])
    except json.JSONDecodeError:
        last = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise TowlineError(f"the checks before the start died: {last} (log: {log})", code="preflight") from None
    if "code" in answer:
        kind = UsageError if answer["exit_status"] == UsageError.exit_status else TowlineError
        raise kind(answer["message"], code=answer["code"])
    return Preflight(note=answer["note"])


def check(settings: Settings, directory: RunDirectory, *, model: bool) -> Preflight:
    """The checks themselves. Raises `TowlineError`, `UsageError` where the settings are wrong."""
    if model:
        return Preflight(note=_base_model(settings.model, settings.run.seed, directory))
    _check_imports(settings)
    _check_devices(settings)
    return Preflight(note="")


def _check_imports(settings: Settings) -> None:
    from towline.learner.names import check_names
    from towline.verifiers.base import load_verifier

    check_names(settings)
    load_verifier(settings.reward.function, settings.reward.arguments)
    paths = {
        "prompts.source": settings.prompts.source,
        "prompts.eval_source": settings.prompts.eval_source,
        "prompts.environment": settings.prompts.environment,
        "model.factory": settings.model.factory,
    }
    if settings.trainer.backend == "megatron" and find_spec("megatron") is None:
        raise UsageError("trainer.backend = 'megatron' needs megatron-core: pip install 'towline[megatron]'", code="install")
    for setting, path in paths.items():
        if path is not None and not callable(import_object(path, setting)):
            raise UsageError(f"{setting} = {path!r} isn't callable; name a function or a class", code="import")
    if settings.eval.every and settings.prompts.eval_source is None:
        raise UsageError("eval.every is set and prompts.eval_source isn't: name one, or set eval.every = 0", code="config")


def _check_devices(settings: Settings) -> None:
    """Those of this Python's torch: SGLang's is another one's."""
    wanted = {"trainer.device": settings.trainer.device}
    if settings.rollout.engine == "torch":
        wanted["rollout.device"] = settings.rollout.device
    for setting, name in wanted.items():
        if name == "cpu" or find_spec("torch") is None:  # without torch the model says what to install
            continue
        import torch

        try:
            device = torch.device(name)
        except RuntimeError:
            raise UsageError(f"{setting} = {name!r}: there is no such device; use cpu or cuda", code="device") from None
        if device.type == "cuda" and (count := torch.cuda.device_count()) <= (device.index or 0):
            raise UsageError(f"{setting} = {name!r}: torch finds {count or 'no'} GPUs here; use cpu", code="device")


def _base_model(model: ModelSettings, seed: int, directory: RunDirectory) -> str:
    if model.factory is not None:
        return _make(model.factory, model.arguments, seed, directory)
    try:
        from towline.learner.export import locate
    except ModuleNotFoundError as error:
        raise UsageError(f"no module {error.name!r}: pip install 'towline[torch]'", code="install") from None
    locate(model.source, model.revision)
    return ""


def _make(factory: str, arguments: dict[str, Any], seed: int, directory: RunDirectory) -> str:
    """The factory's folder, made once and whole: a folder that a killed process left half-made has another name."""
    if directory.model_path.is_dir():
        return ""
    scratch = directory.model_path.with_name("model.making")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    call = import_object(factory, "model.factory")
    try:
        note = call(scratch, seed, **arguments)
    except TowlineError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise UsageError(f"model.factory = {factory!r} raised {type(error).__name__}: {text}", code="model_factory") from error
    if not (scratch / "config.json").is_file():
        raise UsageError(f"model.factory = {factory!r} wrote no config.json; write a Hugging Face folder", code="model_factory")
    scratch.rename(directory.model_path)
    return str(note) if note else "made by model.factory"


def main() -> None:
    path = Path(sys.argv[2])
    try:
        answer: dict[str, Any] = {"note": check(load_settings(path), RunDirectory(path.parent), model="--model" in sys.argv).note}
    except TowlineError as error:
        traceback.print_exc()
        message = " ".join(error.message.split())
        answer = {"code": error.code, "message": message, "exit_status": error.exit_status}
    print(f"\n{json.dumps(answer)}")


if __name__ == "__main__":
    main()
