"""`make compose-test`: the compose file for real. Built, brought up, one worker crashed and another killed, scaled up and down,
the leading buffer killed, while the run learns; stopped, it is whole by the audit; brought down, nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import yaml

from compose.engine import Engine
from compose.project import FOLDER, SERVICES, TOML, Project, a_project, health, say
from towline.client.grpc import GrpcGateway
from towline.errors import TowlineError

pytestmark = pytest.mark.slow

LIAR = Path(__file__).with_name("liar.py").read_text()
STRANGER = Path(__file__).with_name("stranger.py").read_text()
ALERTS = FOLDER.parent / "observe/prometheus/alerts.yml"
REWARD_MOVES = 0.05


@pytest.fixture
def project(built: Engine) -> Iterator[Project]:
    # It doesn't end before the test does.
    with a_project(built, "run", TOWLINE_RUN="compose-test", TOWLINE_RUN__STEPS="10000", LOAD_REQUESTS="60") as found:
        yield found


def test_a_run_in_containers(project: Project) -> None:
    say("up, with two workers and two buffers")
    project.compose("up", "--detach", "--scale", "rollout-worker=2", "--scale", "buffer=2")
    project.compose("--profile", "observe", "up", "--detach", "--no-recreate", "--no-deps", "prometheus")
    project.start_tools()
    project.until(lambda: all(health(one) == "healthy" for one in project.running()), "all containers are healthy")
    for container in project.containers():
        assert container["Config"]["User"] == "10001:10001", container["Name"]
        for bindings in (container["HostConfig"]["PortBindings"] or {}).values():
            assert [binding["HostIp"] for binding in bindings] == ["127.0.0.1"], container["Name"]
    leading, standby = sorted((one["Id"] for one in project.containers("buffer")), key=lambda one: not _ready(project, one))
    assert (_ready(project, leading), _ready(project, standby)) == (True, False)
    _ask_the_gateway(project)
    _ask_over_grpc(project)
    _watched(project)
    _closed(project)
    told = project.towline("doctor", TOML)
    assert told["faults"] == 0, told
    assert [found["what"] for found in told["findings"] if "torch isn't installed here" in found["what"]], told

    say("a store that takes what it should refuse is refused")
    project.beside("liar", "--entrypoint", "python", "towline/tools:compose-test", "-c", LIAR)
    with pytest.raises(AssertionError, match="store_lies"):
        project.compose("run", "--rm", "-T", "--no-deps", "-e", "TOWLINE_STORE__ENDPOINT=http://liar:8333", "init")

    say("a version of depth 5 acknowledged by all, and the reward moves")
    first = project.until(lambda: project.acknowledged(depth=5, replicas=2), "version 5 is acknowledged")

    say("a worker's process crashes: the engine starts its container again; another's container is killed for good")
    crashed, killed = project.containers("rollout-worker")
    _crash(project, crashed["Id"])
    project.until(lambda: project.one(crashed["Id"])["RestartCount"] == 1, "the crashed container runs again")
    project.engine.docker("kill", killed["Id"])

    say("four workers")
    project.compose("up", "--detach", "--no-recreate", "--scale", "rollout-worker=4", "--scale", "buffer=2")
    depth = max(first["acknowledged"].values())
    project.until(lambda: project.acknowledged(depth=depth + 1, replicas=4), "four workers acknowledge")

    say("load on the gateway")
    told = json.loads(project.compose("--profile", "load", "run", "--rm", "load").splitlines()[-1])
    assert (told["requests"], told["failed"]) == (60, 0), told

    say("one worker: the others hand over what they have and end with 0")
    before = {one["Id"] for one in project.containers("rollout-worker")}
    stopped = sorted(before)[1:]
    project.engine.docker("stop", "--time", "45", *stopped, seconds=120)
    assert [project.one(one)["State"]["ExitCode"] for one in stopped] == [0, 0, 0]

    say("the leading buffer's container is killed: the standby takes over, and the killed one stands by when it's back")
    depth = max(project.look()["acknowledged"].values())
    project.engine.docker("kill", leading)
    project.until(lambda: _ready(project, standby), "the standby leads")
    project.engine.docker("start", leading)
    project.until(lambda: project.acknowledged(depth=depth + 2, replicas=1), "versions go on")
    project.until(lambda: health(project.one(leading)) == "healthy" and not _ready(project, leading), "the other stands by")

    say("the trainer's process crashes, and the bus is restarted")
    depth = max(project.look()["acknowledged"].values())
    (trainer,), (bus,) = project.containers("trainer"), project.containers("nats")
    _crash(project, trainer["Id"])
    project.engine.docker("restart", "--time", "20", bus["Id"])
    project.until(lambda: project.acknowledged(depth=depth + 3, replicas=1), "versions go on")
    assert project.one(trainer["Id"])["RestartCount"] == 1

    reward = first["reward"] + REWARD_MOVES
    project.until(lambda: project.look()["reward"] > reward, f"the batches' mean reward is above {reward:.2f}")

    say("down, in order, and what is left is whole")
    assert project.stop_whole()["depth"] > depth


def _ask_the_gateway(project: Project) -> None:
    """Through its published port, with the tenant's token, and without."""
    url = f"http://127.0.0.1:{project.engine.environment['TOWLINE_GATEWAY_PORT']}/generate"
    body = {"text": "52918>", "sampling_params": {"max_new_tokens": 4}}
    assert httpx.post(url, json=body, timeout=10).status_code == httpx.codes.UNAUTHORIZED
    answer = httpx.post(url, json=body, headers={"Authorization": f"Bearer {_token(project)}"}, timeout=120)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["output_ids"]


def _ask_over_grpc(project: Project) -> None:
    """As above."""
    address = f"127.0.0.1:{project.engine.environment['TOWLINE_GATEWAY_GRPC_PORT']}"
    with GrpcGateway(address, token="not-a-tenants-token") as stranger, pytest.raises(TowlineError) as refusal:
        stranger.versions()
    assert isinstance(refusal.value.__cause__, grpc.RpcError)
    assert refusal.value.__cause__.code() is grpc.StatusCode.UNAUTHENTICATED
    with GrpcGateway(address, token=_token(project)) as gateway:
        [found] = gateway.generate("52918>", sampling={"max_new_tokens": 4})
    assert found.tokens


def _token(project: Project) -> str:
    return project.engine.docker("exec", project.tools, "cat", "/access/tenant.token").strip()


def _watched(project: Project) -> None:
    """Prometheus has figures of every service, and evaluates every rule."""
    url = f"http://127.0.0.1:{project.engine.environment['TOWLINE_PROMETHEUS_PORT']}/api/v1"

    def up() -> bool:
        targets = httpx.get(f"{url}/targets", timeout=10).json()["data"]["activeTargets"]
        found = {(target["labels"]["job"].removeprefix("towline-"), target["health"]) for target in targets}
        return found == {(name, "up") for name in SERVICES}

    def evaluated() -> bool:
        groups = httpx.get(f"{url}/rules", timeout=10).json()["data"]["groups"]
        found = {(rule["name"], rule["health"]) for group in groups for rule in group["rules"]}
        return found == {(rule, "ok") for rule in alerts}

    given = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {rule["alert"] for group in given for rule in group["rules"]}
    project.until(up, "Prometheus scrapes every service")
    project.until(evaluated, f"Prometheus evaluates all {len(alerts)} alerts")


def _closed(project: Project) -> None:
    """Of the store only what asks for keys can be reached from other containers, and the bus's monitor can't."""
    (store,), (bus,) = project.containers("store"), project.containers("nats")
    assert _open_ports(project, store["Id"]) == {8333, 18333}
    assert _open_ports(project, bus["Id"]) == {4222}
    assert json.loads(project.python(STRANGER, "store:8333", "store:18333")) == {"s3": "AccessDenied", "grpc": "UNAVAILABLE"}


def _open_ports(project: Project, container: str) -> set[int]:
    """Those that listen on more than the loopback, from its kernel's tables."""
    tables = "for table in tcp tcp6; do while read line; do echo $line; done < /proc/net/$table; done"
    rows = [line.split() for line in project.engine.docker("exec", container, "sh", "-c", tables).splitlines()]
    listening = [row[1].split(":") for row in rows if len(row) > 3 and row[3] == "0A"]
    loopback = ("0100007F", "00000000000000000000000001000000", "0B00007F")  # the last is the engine's resolver
    return {int(port, 16) for address, port in listening if address not in loopback}


def _ready(project: Project, container: str) -> bool:
    """What /readyz says, which is nothing about a standby's health."""
    ask = "from towline.runtime.probe import probe; import os; print(probe('/readyz', dict(os.environ)))"
    return not project.engine.docker("exec", container, "python", "-c", ask).strip()


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
