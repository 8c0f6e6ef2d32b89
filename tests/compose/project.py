"""A compose project of a test: what its containers are and say, and what it leaves behind."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compose.engine import Engine

FOLDER = Path(__file__).parents[2] / "compose"
TOML = "/config/demo.toml"
SERVICES = ("gateway", "rollout-worker", "trainer", "reward", "publisher", "buffer")
PATIENCE_SECONDS = 480.0
"""A minute or two each where nothing else runs; nothing is measured here."""
_LOOK = Path(__file__).with_name("look.py").read_text()
_LOG = Path(os.environ.get("COMPOSE_TEST_LOG", "/tmp/compose-test.log"))


class Project:
    """The compose files under a name of their own; `tools` is a container that looks in from inside."""

    def __init__(self, engine: Engine, name: str, files: tuple[str, ...] = ("compose.yaml",)) -> None:
        self.engine = engine
        self.name = name
        self.tools = f"{name}-tools"
        self._files = [part for file in files for part in ("--file", str(FOLDER / file))]
        self._beside = [self.tools]

    def compose(self, *arguments: str, seconds: float = 300.0) -> str:
        return self.engine.compose("--project-name", self.name, *self._files, *arguments, seconds=seconds)

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """As `docker inspect` tells of them."""
        labels = [f"label=com.docker.compose.project={self.name}", "label=com.docker.compose.oneoff=False"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        found = self.engine.docker("ps", "--all", "--quiet", *[part for label in labels for part in ("--filter", label)]).split()
        return json.loads(self.engine.docker("inspect", *found)) if found else []

    def running(self) -> list[dict[str, Any]]:
        """Those that stay up."""
        once = ("access", "init")
        return [one for one in self.containers() if one["Config"]["Labels"]["com.docker.compose.service"] not in once]

    def one(self, container: str) -> dict[str, Any]:
        return json.loads(self.engine.docker("inspect", container))[0]  # type: ignore[no-any-return]

    def beside(self, name: str, *arguments: str) -> str:
        """`docker run` in the project's network, where it's reached by `name`; the container's own name."""
        own = f"{self.name}-{name}"
        self._beside.append(own)
        network = ("--network", f"{self.name}_default", "--network-alias", name)
        self.engine.docker("run", "--detach", "--init", "--name", own, *network, *arguments)
        return own

    def start_tools(self) -> None:
        self.compose("run", "--detach", "--name", self.tools, "--entrypoint", "sleep", "tools", "3600")

    def python(self, script: str, *arguments: str) -> str:
        """What it prints in the tools' container."""
        return self.engine.docker("exec", self.tools, "python", "-c", script, *arguments)

    def towline(self, *arguments: str) -> Any:
        return json.loads(self.engine.docker("exec", self.tools, "towline", *arguments, "--json", check=False).splitlines()[-1])

    def look(self) -> dict[str, Any]:
        return json.loads(self.python(_LOOK, TOML).splitlines()[-1])  # type: ignore[no-any-return]

    def acknowledged(self, *, depth: int, replicas: int) -> dict[str, Any] | None:
        """The look, once so many replicas are there and all have a version of that depth."""
        found = self.look()
        depths = found["acknowledged"]
        done = len(found["replicas"]) == len(depths) == replicas and min(depths.values()) >= depth
        return found if done else None

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """What the condition gives, once it gives something; the services' last words where it takes too long."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := condition()):
            if time.monotonic() > deadline:
                pytest.fail(
                    f"not within {PATIENCE_SECONDS:g} s: {what}\n{self.compose('ps')}\n{self.compose('logs', '--tail', '15')}"
                )
            time.sleep(2.0)
        say(f"  {what}")
        return found

    def stop_whole(self) -> dict[str, Any]:
        """Stop the services, each of which ends with 0; the audit of what is left, which is clean."""
        self.compose("stop", *SERVICES)
        codes = {one["Name"]: one["State"]["ExitCode"] for service in SERVICES for one in self.containers(service)}
        assert set(codes.values()) == {0}, codes
        report = self.towline("audit", TOML)
        assert report["clean"], report
        assert report["samples"]["trained"] > 0
        return report  # type: ignore[no-any-return]

    def down(self) -> None:
        _LOG.write_text(self.compose("logs", "--no-color", "--tail", "60"))
        self.engine.docker("rm", "--force", "--volumes", *self._beside, check=False)
        self.compose("--profile", "observe", "down", "--volumes", "--timeout", "20")

    def left_behind(self) -> list[str]:
        mine = ("--filter", f"label=com.docker.compose.project={self.name}")
        containers = self.engine.docker("ps", "--all", "--quiet", *mine).split()
        return containers + [
            line for kind in ("volume", "network") for line in self.engine.docker(kind, "ls", "--quiet", *mine).split()
        ]


@contextmanager
def a_project(engine: Engine, name: str, *files: str, **environment: str) -> Iterator[Project]:
    """A project, with ports that are free, that is brought down at the end and leaves nothing."""
    ports = {f"TOWLINE_{name}_PORT": str(_free_port()) for name in ("GATEWAY", "GATEWAY_GRPC", "PROMETHEUS")}
    given = dict(engine.environment) | ports | environment
    own = f"towline-test-{name}-{os.getpid()}"
    project = Project(Engine(given, engine.compose_command, engine.private), own, files or ("compose.yaml",))
    try:
        yield project
    finally:
        project.down()
    assert project.left_behind() == []


def health(container: dict[str, Any]) -> str:
    return str(container["State"]["Health"]["Status"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)
