"""load.json in a run's folder: how its synthetic parts behave, for the processes that the driver starts."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from towline.config import Settings
from towline.errors import UsageError
from towline.loadtest.scenario import Load


def plan_path(settings: Settings) -> Path:
    return Path(settings.run.directory) / settings.run.name / "load.json"


def write_plan(settings: Settings, load: Load) -> None:
    path = plan_path(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(load.model_dump_json(indent=1))


def read_plan(settings: Settings) -> Load:
    path = plan_path(settings)
    try:
        return Load.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; `towline loadtest` writes it before it starts this process", code="plan"
        ) from None
    except ValidationError as error:
        raise UsageError(f"{path}: {error.errors()[0]['msg']}", code="plan") from None
