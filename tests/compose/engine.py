"""A Docker engine for the compose test: this machine's own where one answers, else a private one that leaves nothing behind.

The private one needs root and Debian's packages docker.io, docker-compose and debootstrap. Without a registry its base images
are made here (standins.py) and tagged as the public ones, so that the compose file is run as it is. Images and build cache
stay in CACHE for the next time; `rm -r` removes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CACHE = Path(os.environ.get("TOWLINE_COMPOSE_CACHE", Path.home() / ".cache" / "towline-compose"))
ENGINE_SECONDS = 30.0
DEBIANS = "/usr/bin:/usr/sbin:/sbin:/bin"
"""Where Debian's docker is, whatever else of that name comes first on the PATH."""


@dataclass(frozen=True, slots=True)
class Engine:
    """`environment` leads docker and compose to the engine."""

    environment: Mapping[str, str]
    compose_command: tuple[str, ...]
    private: bool
    more: Mapping[str, str] = field(default_factory=dict)

    def docker(self, *arguments: str, seconds: float = 60.0, stdin: str | None = None, check: bool = True) -> str:
        return call(["docker", *arguments], self.environment, seconds, stdin=stdin, check=check)

    def compose(self, *arguments: str, seconds: float = 120.0, stdin: str | None = None, check: bool = True) -> str:
        return call([*self.compose_command, *arguments], self.environment, seconds, stdin=stdin, check=check)


def call(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, *, stdin: str | None = None, check: bool = True
) -> str:
    """Its standard output; where it fails, what it said last."""
    done = subprocess.run(command, env=dict(environment), timeout=seconds, input=stdin, capture_output=True, text=True)
    if check and done.returncode:
        said = f"{done.stdout}\n{done.stderr}".strip().splitlines()[-40:]
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n" + "\n".join(said))
    return done.stdout


@contextmanager
def an_engine() -> Iterator[Engine]:
    """This machine's engine with `docker compose`, else a private one."""
    own = dict(os.environ)
    if _answers(["docker", "info"], own) and _answers(["docker", "compose", "version"], own):
        yield Engine(own, ("docker", "compose"), private=False)
        return
    with _private() as engine:
        yield engine


@contextmanager
def _private() -> Iterator[Engine]:
    environment = os.environ | {"PATH": f"{DEBIANS}:{os.environ['PATH']}", "DOCKER_HOST": f"unix://{CACHE / 'docker.sock'}"}
    environment |= {"DOCKER_BUILDKIT": "1", "COMPOSE_DOCKER_CLI_BUILD": "1"}
    missing = [name for name in ("dockerd", "docker-compose", "debootstrap") if not shutil.which(name, path=environment["PATH"])]
    assert not missing, f"no Docker engine here and no {', '.join(missing)}: apt-get install docker.io docker-compose debootstrap"
    assert os.geteuid() == 0, "no Docker engine here; one is started as root alone"
    CACHE.mkdir(parents=True, exist_ok=True)
    before = _firewall()
    with (CACHE / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", "--data-root", str(CACHE / "data"), "--exec-root", str(CACHE / "exec"),
             "--pidfile", str(CACHE / "dockerd.pid"), "--host", environment["DOCKER_HOST"]],
            env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + ENGINE_SECONDS
        while not _answers(["docker", "info"], environment):
            assert daemon.poll() is None, f"dockerd ended: {(CACHE / 'dockerd.log').read_text()[-2000:]}"
            assert time.monotonic() < deadline, "dockerd doesn't answer"
            time.sleep(0.3)
        yield Engine(environment, ("docker-compose",), private=True)
    finally:
        daemon.terminate()
        daemon.wait(60)
        subprocess.run(["umount", str(CACHE / "exec/netns/default")], timeout=20, capture_output=True)  # it may leave this
        _restore(before)


def _answers(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    try:
        return subprocess.run(command, env=dict(environment), capture_output=True, timeout=20).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def _firewall() -> str:
    return subprocess.run(["iptables-save"], capture_output=True, text=True, timeout=20, check=True).stdout


def _restore(before: str) -> None:
    """An engine that ends leaves its rules and its bridge. A table that wasn't there before can't be taken away, but emptied."""
    had, emptied = set(re.findall(r"^\*(\w+)", before, re.MULTILINE)), ""
    for table, body in re.findall(r"^\*(\w+)\n(.*?)^COMMIT", _firewall(), re.MULTILINE | re.DOTALL):
        if table not in had:
            built_in = re.findall(r"^:(\w+) (?:ACCEPT|DROP)", body, re.MULTILINE)
            emptied += "\n".join([f"*{table}", *(f":{chain} ACCEPT [0:0]" for chain in built_in), "COMMIT\n"])
    subprocess.run(["iptables-restore"], input=before + emptied, text=True, timeout=20, check=True)
    subprocess.run(["ip", "link", "delete", "docker0"], timeout=20, capture_output=True)
    left = {line for line in _firewall().splitlines() if line.startswith("-A")} - set(before.splitlines())
    assert not left, f"the engine's firewall rules are left: {left}"
