"""One engine for all tests here, with Towline's images built once."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml

from compose.engine import Engine, an_engine
from compose.project import FOLDER, Project, say
from compose.standins import make_missing


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with an_engine() as found:
        yield found


@pytest.fixture(scope="session")
def base_python() -> str:
    """The name of the image that Towline's are made from."""
    given = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    python = re.search(r":-([^}]+)", given["x-build"]["args"]["PYTHON_IMAGE"])
    assert python is not None
    return python[1]


@pytest.fixture(scope="session")
def built(engine: Engine, base_python: str) -> Engine:
    """The engine, and an environment in which the compose files use images that are there."""
    environment = dict(engine.environment) | {"TOWLINE_TAG": "compose-test"}
    if engine.private:
        given = yaml.safe_load((FOLDER / "compose.yaml").read_text())
        torch = re.search(r"^torch==\S+", (FOLDER.parent / "constraints.txt").read_text(), re.MULTILINE)
        assert torch is not None
        nats, store, prometheus = (given["services"][name]["image"] for name in ("nats", "store", "prometheus"))
        say("base images")
        make_missing(engine, base_python, nats, store, prometheus, torch[0])
        environment["TOWLINE_TORCH_INDEX"] = ""
    found = Engine(environment, engine.compose_command, engine.private)
    say("building")
    Project(found, "towline-test-build").compose("build", seconds=900)
    return found
