"""How a settings file becomes typed settings: TOML, then the environment, then the caller; and import paths looked up.

Nothing here knows a setting of a run: `towline.config` does. A fault is one line that names the key and the way out.
"""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from towline.errors import UsageError

ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
"""Of every table of the file: nothing but what it names, and it never changes."""

T = TypeVar("T", bound=BaseModel)


def read_settings(kind: type[T], path: Path, overrides: dict[str, Any] | None = None) -> T:
    """The file, then `TOWLINE_SECTION__KEY` from the environment, then `overrides` ({"section.key": value}); of a
    table within a section too, as in gateway.sessions.claim_seconds.

    Puts the file's folder on `sys.path`. Raises `UsageError` with one line a fault.
    """
    tree = read_toml(path)
    for name, value in os.environ.items():
        if name.startswith("TOWLINE_") and "__" in name:
            _set(tree, name.removeprefix("TOWLINE_").lower().split("__"), _literal(value))
    for dotted, value in (overrides or {}).items():
        _set(tree, dotted.split("."), value)
    try:
        settings = kind.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"{path}: {faults(error, kind)}", code="config") from None
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return settings


def read_toml(path: Path, wanted: str = "give a run's TOML file") -> dict[str, Any]:
    """The file's tables as they stand. `UsageError` where it's missing, no file, or no TOML; it ends with what is `wanted`."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; {wanted}", code="config_missing") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: a folder; {wanted}", code="config_missing") from None
    except (OSError, ValueError) as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise UsageError(f"{path}: no TOML: {error}", code="config_syntax") from None
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "isn't text"
        raise UsageError(f"{path}: {why}; {wanted}", code="config_syntax") from None


def import_object(path: str, setting: str) -> Any:
    """What `module:name` names; `UsageError` says which setting is wrong and why."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise UsageError(f"{setting} = {path!r}: write an import path as module:name, like my_task:reward", code="import")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{setting} = {path!r}: no module {error.name!r}; install it, or put it beside the run's TOML file",
            code="import",
        ) from error
    except AttributeError:
        raise UsageError(f"{setting} = {path!r}: module {module!r} has no {name!r}", code="import") from None


def _set(tree: dict[str, Any], path: list[str], value: Any) -> None:
    """At any depth: gateway.sessions.claim_seconds as well as run.steps."""
    *tables, key = path
    for depth, name in enumerate(tables, 1):
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise UsageError(f"[{'.'.join(tables[:depth])}] must be a table", code="config")
    tree[key] = value


def _literal(text: str) -> Any:
    """An environment variable's value, read as TOML where it is that, else as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def faults(error: ValidationError, kind: type[BaseModel] | None = None, table: tuple[str, ...] = ()) -> str:
    """All of them in one line. `kind`: the model, so that its tables are called what they are; `table`: where it stands."""
    return "; ".join(
        _fault(item | {"loc": (*table, *item["loc"])}, kind) for item in error.errors(include_url=False, include_input=False)
    )


def _fault(item: Any, kind: type[BaseModel] | None) -> str:
    where = ".".join(str(part) for part in item["loc"]) or "the file"
    table = _table(item["loc"], kind)
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key; remove it or correct its spelling"
    if item["type"] == "missing" and table is not None:
        needed = [name for name, field in table.model_fields.items() if field.is_required()]
        return f"[{where}] is missing" + (f"; it needs {' and '.join(needed)}" if needed else "")
    if item["type"] == "missing":
        return f"{where}: missing; it has no default"
    if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}: must be a table, [{where}]"
    if item["type"] == "string_pattern_mismatch":  # ImportPath is the only pattern
        return f"{where}: write an import path as module:name, like my_task:reward"
    return f"{where}: {item['msg'].removeprefix('Value error, ')}"


def _table(loc: tuple[Any, ...], kind: type[BaseModel] | None) -> type[BaseModel] | None:
    """The model that stands at `loc`, where it's a table."""
    for name in loc:
        field = kind.model_fields.get(str(name)) if kind is not None else None
        kind = (
            field.annotation if field and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else None
        )
    return kind
