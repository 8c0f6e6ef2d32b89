"""The settings that a run's services read: the given ones, with the local servers' addresses and the base model filled in."""

from __future__ import annotations

from pathlib import Path

from towline.config import BusSettings, ModelSettings, Settings, StoreSettings
from towline.local.run_directory import RunDirectory

DRAIN_SECONDS = 4.0
"""What a service gets at most to drain, so that `towline up` has stopped everything within its bound."""


def effective(given: Settings, source: Path, directory: RunDirectory, bus: BusSettings, store: StoreSettings) -> Settings:
    """Before the model is made: `model` is as given, but a folder's path no longer depends on the working directory.

    `source` is the TOML file: a folder beside it comes before one in the working directory.
    """
    model = given.model
    named = Path(model.source).expanduser() if model.source else None
    for folder in () if named is None else (source.parent / named, named):
        if folder.is_dir():
            model = model.model_copy(update={"source": str(folder.absolute())})
            break
    service = given.service.model_copy(
        update={"port": 0, "drain_seconds": min(given.service.drain_seconds, DRAIN_SECONDS)}  # several services share this host
    )
    run = given.run.model_copy(update={"directory": str(directory.path.parent)})
    return given.model_copy(update={"bus": bus, "store": store, "model": model, "service": service, "run": run})


def with_made_model(settings: Settings, directory: RunDirectory) -> Settings:
    """After the model is made: its folder takes the factory's place."""
    if settings.model.factory is None:
        return settings
    model = ModelSettings(
        source=str(directory.model_path), publish_dtype=settings.model.publish_dtype, arguments={}, revision=None
    )
    return settings.model_copy(update={"model": model})
