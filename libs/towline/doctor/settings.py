"""Looks at a run's settings: whether what they name can be imported, the base model found and the engine made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from towline.config import Settings
from towline.doctor.finding import Finding, fault, ok, warning
from towline.engine.choice import make_engine
from towline.errors import TowlineError
from towline.local.preflight import check
from towline.local.run_directory import RunDirectory


def look_at_settings(settings: Settings, directory: Path) -> Iterator[Finding]:
    """The run's own code is imported here, as in its services; nothing is made."""
    named = f"{settings.reward.function}, {settings.prompts.source}"
    yield _one(
        "code", f"{named} and what else is named can be imported", lambda: check(settings, RunDirectory(directory), model=False)
    )
    yield from _model(settings)
    on_gpu = settings.rollout.device.startswith("cuda") or settings.trainer.device.startswith("cuda")
    needs_torch = on_gpu or settings.rollout.engine == "torch"
    if needs_torch and find_spec("torch") is None and _apart(settings, directory):
        yield warning(
            "engine",
            f"torch isn't installed here, so {settings.rollout.engine} wasn't looked at; only trainer and workers need it",
            "nothing, where those run elsewhere; else pip install 'towline[torch]'",
        )
    else:
        yield _one("engine", f"{settings.rollout.engine}, {settings.rollout.slots} slots", lambda: make_engine(settings.rollout))
        if on_gpu:
            yield _cuda()
    if settings.buffer.max_staleness == 0 and settings.rollout.replicas > 1:
        yield ok("settings", "max_staleness = 0: workers and trainer take turns; a bound of 1 or 2 lets them work at once")


def _apart(settings: Settings, directory: Path) -> bool:
    """Whether the run's services may be on other machines than this one: it wasn't started here, and its servers weren't."""
    return bool(settings.bus.url and settings.store.url) and not RunDirectory(directory).exists


def _one(part: str, good: str, look: Callable[[], object]) -> Finding:
    try:
        look()
    except TowlineError as error:
        return fault(part, error.message, "correct the settings, or install what is missing")
    return ok(part, good)


def _model(settings: Settings) -> Iterator[Finding]:
    model = settings.model
    if model.factory is not None:
        yield ok("model", f"made by {model.factory}")
        return
    folder = Path(model.source).expanduser()
    if not folder.is_dir():
        yield ok("model", f"{model.source}: no folder here, so a Hugging Face id; it's downloaded by the first start")
        return
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            yield fault("model", f"{folder} has no {name}", "name a whole Hugging Face folder")
            return
    if not list(folder.glob("*.safetensors")):
        yield fault("model", f"{folder} has no *.safetensors", "convert it: save_pretrained(…, safe_serialization=True)")
        return
    yield ok("model", str(folder))


def _cuda() -> Finding:
    try:
        import torch
    except ModuleNotFoundError:
        return fault("engine", "a CUDA device is wanted, and torch isn't installed", "pip install 'towline[torch]'")
    if not torch.cuda.is_available():
        return fault(
            "engine", "a CUDA device is wanted, and torch sees none", 'set device = "cpu", or install a CUDA build of torch'
        )
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    if torch.cuda.device_count() < 2:
        return warning(
            "engine", f"one GPU ({names[0]}) for what the settings put on it", "give trainer and worker machines of their own"
        )
    return ok("engine", f"{torch.cuda.device_count()} GPUs: {', '.join(names)}")
