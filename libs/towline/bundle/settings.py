"""A run's settings as they go into a bundle: without secrets, and without addresses and paths of the machine it ran on."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import ValidationError

from towline.config import Settings
from towline.errors import CorruptError

LEFT_OUT = ("bus", "store", "service", "gateway", "telemetry")
"""Sections that name servers and hold their keys; a reader has their defaults."""
_OF_THE_MACHINE = (("run", "directory"), ("rollout", "copy_folder"))
REMOVED = "(removed)"
_SECRET = re.compile(r"secret|password|passwd|credential|api_?key|access_?key|auth|(^|_)key$|(^|_)token$", re.IGNORECASE)


def portable(settings: Settings) -> dict[str, Any]:
    """The sections that a replay may need. A user's `arguments` may hold anything: what its key calls a secret is removed."""
    tree = settings.model_dump(mode="json", exclude=set(LEFT_OUT))
    for section, key in _OF_THE_MACHINE:
        tree[section].pop(key)
    for section in tree.values():
        for key, value in section.items():
            if key == "arguments" or key.endswith("_arguments"):
                section[key] = _cleaned(value)
    return tree


def portable_json(settings: Settings) -> bytes:
    return json.dumps(portable(settings), indent=1, sort_keys=True).encode() + b"\n"


def read_settings(data: bytes, where: str) -> Settings:
    """Without what `portable` leaves out, should it be there. `CorruptError` where they aren't a run's."""
    try:
        tree = json.loads(data)
        if isinstance(tree, dict):
            tree = {section: values for section, values in tree.items() if section not in LEFT_OUT}
            for section, key in _OF_THE_MACHINE:
                if isinstance(tree.get(section), dict):
                    tree[section].pop(key, None)
        return Settings.model_validate(tree)
    except (ValidationError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0]
        raise CorruptError(f"{where}: these aren't settings that this towline knows: {first}", code="bundle_settings") from error


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: REMOVED if isinstance(item, str) and _SECRET.search(key) else _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value
