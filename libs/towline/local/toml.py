"""A run's effective settings as TOML, so that every service reads what `towline up` decided from one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from towline.config import Settings


def settings_toml(settings: Settings) -> str:
    """The whole of the settings, secrets in the clear: the file must be its owner's alone. None is left out, it has no TOML."""
    return sections_toml(settings.model_dump())


def sections_toml(tree: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of keys as TOML, secrets in the clear. None is left out, it has no TOML."""
    return "\n".join(f"[{section}]\n{_table(values)}" for section, values in tree.items())


def _table(values: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, SecretStr):
        return _text(value.get_secret_value())
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    # A date or a time, which TOML has and JSON hasn't.
    return str(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _text(text: str) -> str:
    """A basic string. TOML escapes as JSON does, and DEL besides."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
