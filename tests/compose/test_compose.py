"""`make compose-test`: the compose file for real. Built, brought up, one worker crashed and another killed, scaled up and down
while the run learns; stopped, it is whole by the audit; brought down, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from compose.engine import Engine, an_engine
from compose.standins import make_missing

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "compose"
TOML = "/config/demo.toml"
LOOK = Path(__file__).with_name("look.py").read_text()
LIAR = Path(__file__).with_name("liar.py").read_text()
SERVICES = ("gateway", "rollout-worker", "trainer", "reward", "publisher", "buffer")
REWARD_MOVES = 0.05


class Project:
    """The compose project of this test; `tools` is a container that looks in from inside."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.tools, self.liar = f"{name}-tools", f"{name}-liar"

    def compose(self, *arguments: str, seconds: float = 300.0) -> str:
        return self.engine.compose(
            "--project-name", self.name, "--file", str(FOLDER / "compose.yaml"), *arguments, seconds=seconds
        )

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """As `docker inspect` tells of them."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [part for label in labels for part in ("--filter", label)]
        found = self.engine.docker(
            "ps", "--all", "--quiet", *filters, *["--filter", "label=com.docker.compose.oneoff=False"]
        ).split()
        return json.loads(self.engine.docker("inspect", *found)) if found else []

    def start_tools(self) -> None:
        self.compose("run", "--detach", "--name", self.tools, "--entrypoint", "sleep", "tools", "3600")

    def towline(self, *arguments: str) -> Any:
        return json.loads(self.engine.docker("exec", self.tools, "towline", *arguments, "--json", check=False).splitlines()[-1])

    def look(self) -> dict[str, Any]:
        said = self.engine.docker("exec", self.tools, "python", "-c", LOOK, TOML)
        return json.loads(said.splitlines()[-1])  # type: ignore[no-any-return]

    def left_behind(self) -> list[str]:
        mine = ("--filter", f"label=com.docker.compose.project={self.name}")
        containers = self.engine.docker("ps", "--all", "--quiet", *mine).split()
        return containers + [
            line for kind in ("volume", "network") for line in self.engine.docker(kind, "ls", "--quiet", *mine).split()
        ]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with an_engine() as found:
        yield found


@pytest.fixture(scope="module")
def project(engine: Engine) -> Iterator[Project]:
    given = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    environment = dict(engine.environment) | {
        "TOWLINE_RUN": "compose-test",
        "TOWLINE_RUN__STEPS": "10000",  # it doesn't end before the test does
        "TOWLINE_GATEWAY_PORT": str(_free_port()),
        "TOWLINE_PROMETHEUS_PORT": str(_free_port()),
        "TOWLINE_TAG": "compose-test",
        "LOAD_REQUESTS": "60",
    }
    if engine.private:
        torch = re.search(r"^torch==\S+", (FOLDER.parent / "constraints.txt").read_text(), re.MULTILINE)
        assert torch is not None
        python = re.search(r":-([^}]+)", given["x-build"]["args"]["PYTHON_IMAGE"])
        assert python is not None
        nats, store, prometheus = (given["services"][name]["image"] for name in ("nats", "store", "prometheus"))
        make_missing(engine, python[1], nats, store, prometheus, torch[0])
        environment["TOWLINE_TORCH_INDEX"] = ""
    found = Project(Engine(environment, engine.compose_command, engine.private), f"towline-test-{os.getpid()}")
    try:
        yield found
    finally:
        said = found.compose("logs", "--no-color", "--tail", "60")
        Path(os.environ.get("COMPOSE_TEST_LOG", "/tmp/compose-test.log")).write_text(said)
        found.engine.docker("rm", "--force", found.tools, found.liar, check=False)
        found.compose("--profile", "observe", "down", "--volumes", "--timeout", "20")
    assert found.left_behind() == []


def test_a_run_in_containers(project: Project) -> None:
    _say("building")
    project.compose("build", seconds=900)
    _say("up, with two workers")
    project.compose("up", "--detach", "--scale", "rollout-worker=2")
    project.compose("--profile", "observe", "up", "--detach", "--no-recreate", "--no-deps", "prometheus")
    project.start_tools()
    _until(lambda: all(_health(one) == "healthy" for one in _running(project)), "all containers are healthy", 240, project)
    for container in project.containers():
        assert container["Config"]["User"] == "10001:10001", container["Name"]
        for bindings in (container["HostConfig"]["PortBindings"] or {}).values():
            assert [binding["HostIp"] for binding in bindings] == ["127.0.0.1"], container["Name"]
    _ask_the_gateway(project)
    _until(lambda: _scraped(project) >= set(SERVICES), "Prometheus scrapes every service", 90, project)

    _say("a store that takes what it should refuse is refused")
    project.compose("run", "--detach", "--no-deps", "--name", project.liar, "--entrypoint", "python", "tools", "-c", LIAR)
    with pytest.raises(AssertionError, match="store_lies"):
        project.compose("run", "--rm", "-T", "--no-deps", "-e", f"TOWLINE_STORE__ENDPOINT=http://{project.liar}:8333", "init")

    _say("a version of depth 5 acknowledged by all, and the reward moves")
    first = _until(lambda: _acknowledged(project, depth=5, replicas=2), "version 5 is acknowledged", 240, project)

    _say("a worker's process crashes: the engine starts its container again; another's container is killed for good")
    crashed, killed = project.containers("rollout-worker")
    _crash(project, crashed["Id"])
    _until(lambda: _one(project, crashed["Id"])["RestartCount"] == 1, "the crashed container runs again", 60, project)
    project.engine.docker("kill", killed["Id"])

    _say("four workers")
    project.compose("up", "--detach", "--no-recreate", "--scale", "rollout-worker=4")
    depth = max(first["acknowledged"].values())
    _until(lambda: _acknowledged(project, depth=depth + 1, replicas=4), "four workers acknowledge", 240, project)

    _say("load on the gateway")
    told = json.loads(project.compose("--profile", "load", "run", "--rm", "load").splitlines()[-1])
    assert (told["requests"], told["failed"]) == (60, 0), told

    _say("one worker: the others hand over what they have and end with 0")
    before = {one["Id"] for one in project.containers("rollout-worker")}
    stopped = sorted(before)[1:]
    project.engine.docker("stop", "--time", "45", *stopped, seconds=120)
    assert [_one(project, one)["State"]["ExitCode"] for one in stopped] == [0, 0, 0]

    _say("the trainer's process crashes, and the bus is restarted")
    depth = max(project.look()["acknowledged"].values())
    (trainer,), (bus,) = project.containers("trainer"), project.containers("nats")
    _crash(project, trainer["Id"])
    project.engine.docker("restart", "--time", "20", bus["Id"])
    _until(lambda: _acknowledged(project, depth=depth + 3, replicas=1), "versions go on", 240, project)
    assert _one(project, trainer["Id"])["RestartCount"] == 1

    reward = first["reward"] + REWARD_MOVES
    _until(lambda: project.look()["reward"] > reward, f"the batches' mean reward is above {reward:.2f}", 240, project)

    _say("down, in order, and what is left is whole")
    project.compose("stop", *SERVICES)
    codes = {one["Name"]: one["State"]["ExitCode"] for service in SERVICES for one in project.containers(service)}
    assert set(codes.values()) == {0}, codes
    report = project.towline("audit", TOML)
    assert report["clean"], report
    assert report["depth"] > depth
    assert report["samples"]["trained"] > 0


def _ask_the_gateway(project: Project) -> None:
    """Through its published port, with the tenant's token, and without."""
    url = f"http://127.0.0.1:{project.engine.environment['TOWLINE_GATEWAY_PORT']}/generate"
    token = project.engine.docker("exec", project.tools, "cat", "/access/tenant.token").strip()
    body = {"text": "52918>", "sampling_params": {"max_new_tokens": 4}}
    assert httpx.post(url, json=body, timeout=10).status_code == httpx.codes.UNAUTHORIZED
    answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=120)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["output_ids"]


def _scraped(project: Project) -> set[str]:
    """Services that Prometheus has figures of."""
    url = f"http://127.0.0.1:{project.engine.environment['TOWLINE_PROMETHEUS_PORT']}/api/v1/targets"
    targets = httpx.get(url, timeout=10).json()["data"]["activeTargets"]
    return {target["labels"]["job"].removeprefix("towline-") for target in targets if target["health"] == "up"}


def _acknowledged(project: Project, *, depth: int, replicas: int) -> dict[str, Any] | None:
    found = project.look()
    depths = found["acknowledged"]
    done = len(found["replicas"]) == len(depths) == replicas and min(depths.values()) >= depth
    return found if done else None


def _crash(project: Project, container: str) -> None:
    """SIGKILL the service itself, as the kernel does where memory runs out: not the container's first process."""
    script = (
        "import os, pathlib\n"
        "for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    words = path.read_bytes().split(b'\\0')\n"
        "    if words[0].endswith(b'python') and b'--config' in words:\n"
        "        os.kill(int(path.parent.name), 9)\n"
    )
    project.engine.docker("exec", container, "python", "-c", script, check=False)


def _running(project: Project) -> list[dict[str, Any]]:
    return [
        one for one in project.containers() if one["Config"]["Labels"]["com.docker.compose.service"] not in ("access", "init")
    ]


def _one(project: Project, container: str) -> dict[str, Any]:
    return json.loads(project.engine.docker("inspect", container))[0]  # type: ignore[no-any-return]


def _health(container: dict[str, Any]) -> str:
    return str(container["State"]["Health"]["Status"])


def _until(condition: Callable[[], Any], what: str, seconds: float, project: Project) -> Any:
    """What the condition gives, once it gives something; the services' last words where it takes too long."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}\n{project.compose('ps')}\n{project.compose('logs', '--tail', '15')}")
        time.sleep(2.0)
    _say(f"  {what}")
    return found


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
