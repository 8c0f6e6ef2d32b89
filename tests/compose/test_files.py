"""The compose files as docker-compose itself reads them, each override and profile: needs its program, and no engine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml

from compose.engine import Engine
from compose.project import FOLDER
from manifests.compose_file import OVERRIDES, services

pytestmark = pytest.mark.slow

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
PROFILES = sorted({profile for service in services().values() for profile in service.get("profiles", [])})


def read(engine: Engine, files: tuple[str, ...], profiles: list[str]) -> dict[str, Any]:
    names = [part for file in files for part in ("--file", str(FOLDER / file))]
    chosen = [part for profile in profiles for part in ("--profile", profile)]
    plain = {name: value for name, value in engine.environment.items() if not name.startswith("TOWLINE_")}
    asked = Engine(plain | KEYS, engine.compose_command, engine.private)
    return yaml.safe_load(asked.compose(*names, *chosen, "config"))["services"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("override", ["", *OVERRIDES])
def test_compose_reads_the_files_as_the_tests_of_their_promises_do(engine: Engine, override: str) -> None:
    """So that what tests/manifests asserts of them holds for what is run."""
    files = ("compose.yaml", override) if override else ("compose.yaml",)
    found, expected = read(engine, files, PROFILES), services(*files, environment=KEYS | {"HOME": os.environ["HOME"]})
    assert set(found) == set(expected)
    for name, service in expected.items():
        for key in ("image", "user", "restart", "entrypoint", "read_only", "cap_drop", "security_opt", "init"):
            assert found[name].get(key) == service.get(key), (name, key)
        assert _words(found[name].get("command")) == _words(service.get("command")), name
        assert _environment(found[name]) == _environment(service), name
        if "healthcheck" in service:
            assert found[name]["healthcheck"]["test"] == service["healthcheck"]["test"], name


def _words(command: Any) -> Any:
    """As text; compose writes a dollar sign as two."""
    return [str(word).replace("$$", "$") for word in command] if isinstance(command, list) else command


def _environment(service: dict[str, Any]) -> dict[str, str]:
    """What is set; None, a variable of the shell's that isn't there, and "" are the same to Towline's settings."""
    return {name: str(value) for name, value in (service.get("environment") or {}).items() if value not in (None, "")}
