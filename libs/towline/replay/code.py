"""Code that a bundle names. A bundle is somebody's data: what it names as a loss is run only where its reader named it, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towline.bundle.folder import BundleSource
from towline.bundle.source import Source
from towline.config import Settings
from towline.errors import UsageError
from towline.learner.registry import ADVANTAGES, CORRECTIONS, LOSSES

_NAMED = {"loss": LOSSES, "advantage": ADVANTAGES, "correction": CORRECTIONS}


def check_code(source: Source, settings: Settings, changes: Mapping[str, Any], code: Path | None) -> None:
    """`UsageError` where the source is a bundle, and its `settings` name an import path that isn't Towline's own, that no
    change on the command line names, and whose module doesn't lie in the folder `code`."""
    if not isinstance(source, BundleSource):
        return
    for key, own in _NAMED.items():
        path = getattr(settings.trainer, key)
        if ":" not in path or path in own.values() or f"trainer.{key}" in changes or _lies_in(code, path):
            continue
        raise UsageError(
            f"{source.where} names code to run: trainer.{key} = {path!r}; if you trust it, give the folder where it lies with "
            f"--code, or name it yourself with --set trainer.{key}={path}",
            code="bundle_code",
        )


def _lies_in(code: Path | None, path: str) -> bool:
    module = path.partition(":")[0].partition(".")[0]
    return code is not None and module.isidentifier() and ((code / module).is_dir() or (code / f"{module}.py").is_file())
