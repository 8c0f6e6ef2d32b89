"""The compose files, read as compose does: variables replaced by their defaults, merge keys followed, overrides laid on top."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "compose"
OVERRIDES = tuple(sorted(path.name for path in FOLDER.glob("store.*.yaml")))
_VARIABLE = re.compile(r"\$\{(\w+)(?::?([-?])([^}]*))?\}|\$\$")


def load(*names: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The files' merged tree. A variable without a default needs its value in `environment`."""
    tree: dict[str, Any] = {}
    for name in names or ("compose.yaml",):
        tree = _merged(tree, _interpolated(yaml.safe_load((FOLDER / name).read_text()), environment or {}))
    return tree


def services(*names: str, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(*names, environment=environment)["services"]
    return found


def _interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolated(one, environment) for key, one in value.items()}
    if isinstance(value, list):
        return [_interpolated(one, environment) for one in value]
    if not isinstance(value, str):
        return value

    def of(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[1] in environment:
            return environment[match[1]]
        assert match[2] == "-", f"{match[0]} has no default"
        return match[3]

    return _VARIABLE.sub(of, value)


def _merged(below: Any, above: Any) -> Any:
    """Mappings key by key; commands, entrypoints and healthchecks' tests are replaced, as compose does."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}
    return above
