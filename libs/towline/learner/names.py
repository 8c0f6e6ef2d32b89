"""Whether the names of a run's backend, loss, correction and advantage stand for something: asked before anything starts.

Without importing what they name, which would load torch: a module is found without running it, and its source read for the name.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from towline.config import Settings
from towline.errors import UsageError
from towline.learner.registry import ADVANTAGES, BACKENDS, CORRECTIONS, LOSSES


def check_names(settings: Settings) -> None:
    """`UsageError` with one line for the first that names nothing."""
    trainer = settings.trainer
    for setting, names, name in (
        ("trainer.backend", BACKENDS, trainer.backend),
        ("trainer.loss", LOSSES, trainer.loss),
        ("trainer.correction", CORRECTIONS, trainer.correction),
        ("trainer.advantage", ADVANTAGES, trainer.advantage),
    ):
        if ":" in name:
            _check_path(setting, name)
        elif name not in names:
            raise UsageError(f"{setting} = {name!r}: use {', '.join(names)}, or an import path module:name", code="unknown_name")


def _check_path(setting: str, path: str) -> None:
    module, _, name = path.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"{setting} = {path!r}: write an import path as module:name", code="import")
    try:
        spec = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None:
        raise UsageError(
            f"{setting} = {path!r}: no module {module!r}; install it, or put it beside the run's TOML file", code="import"
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled: only an import could tell
    source = Path(spec.origin)
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"{setting} = {path!r}: {source} can't be read: {error}", code="import") from error
    bound = _bound(tree.body)
    if name not in bound and not bound & {"*", "__getattr__"}:
        raise UsageError(f"{setting} = {path!r}: module {module!r} has no {name!r}", code="import")


def _bound(body: list[ast.stmt]) -> set[str]:
    """The names that a module's source binds; "*" where it takes another's."""
    found: set[str] = set()
    for node in (each for statement in body for each in _statements(statement)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return found


def _statements(statement: ast.stmt) -> list[ast.stmt]:
    """The statement, or those in it that bind in the module's scope: of an if, a try or a with."""
    if not isinstance(statement, ast.If | ast.Try | ast.With):
        return [statement]
    inner = [*statement.body, *getattr(statement, "orelse", []), *getattr(statement, "finalbody", [])]
    inner += [each for handler in getattr(statement, "handlers", []) for each in handler.body]
    return [found for each in inner for found in _statements(each)]
