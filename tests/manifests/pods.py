"""The bus's pods of an overlay as processes here: rendered configuration, the container's environment, Secrets as folders.

Each has a loopback address of its own. What is replaced in the configuration is paths, addresses and ports, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from manifests.rendered import Resource, config_map, of_kind
from support.waiting import until

BINARIES = Path(sys.executable).parent
PORTS = (4222, 6222, 7422, 8222)
CERTIFICATE = "nats-tls"


@dataclass
class Machine:
    """Where pods' ports and addresses lie here. `ca` signs every server's certificate."""

    folder: Path
    network: str = field(default_factory=lambda: f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}")
    ports: dict[int, int] = field(default_factory=lambda: {port: _free_port() for port in PORTS})
    ca: trustme.CA = field(default_factory=trustme.CA)

    def address(self, cluster: int, pod: int) -> str:
        return f"{self.network}.{10 * cluster + pod + 1}"

    def url(self, scheme: str, address: str, port: int) -> str:
        return f"{scheme}://{address}:{self.ports[port]}"


@dataclass
class BusPods:
    """The pods of `workload`, which makes the bus of k8s/`overlay`. `secrets`: name -> folder with its keys as files."""

    machine: Machine
    overlay: str
    cluster: int
    """A number of its own among the machine's."""
    secrets: Mapping[str, Path]

    @property
    def workload(self) -> Resource:
        return of_kind(self.overlay, "StatefulSet", "Deployment")["nats"]

    @property
    def addresses(self) -> list[str]:
        return [self.machine.address(self.cluster, pod) for pod in range(self.workload["spec"]["replicas"])]

    @property
    def url(self) -> str:
        """As the Service gives it: any of them."""
        return ",".join(self.machine.url("tls", address, 4222) for address in self.addresses)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until each says that it's well by the path that its start is probed at."""
        processes = []
        try:
            for pod, address in enumerate(self.addresses):
                folder = self._lay_out(pod, address)
                with (folder / "log").open("wb") as log:
                    command = self._container["command"] + [self._here(one, folder, address) for one in self._container["args"]]
                    processes.append(
                        await asyncio.create_subprocess_exec(
                            BINARIES / command[0], *command[1:], env=self._environment(pod), stdout=log, stderr=log
                        )
                    )
            path = self._container["startupProbe"]["httpGet"]["path"]
            for address in self.addresses:
                await until(lambda at=address: asyncio.to_thread(_well, self.machine.url("http", at, 8222) + path), 60)
            yield
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            for process in processes:
                await process.wait()

    async def leaf_connections(self) -> list[str]:
        """The accounts of those that have joined its servers."""
        found = []
        for address in self.addresses:
            page = await asyncio.to_thread(_page, self.machine.url("http", address, 8222) + "/leafz")
            found += [one["account"] for one in json.loads(page).get("leafs") or []]
        return found

    @property
    def _container(self) -> Resource:
        (container,) = self.workload["spec"]["template"]["spec"]["containers"]
        return dict(container)

    def _lay_out(self, pod: int, address: str) -> Path:
        """The pod's file system: every volume as a folder, under the path at which the container has it."""
        folder = self.machine.folder / f"{self.overlay.rpartition('/')[2]}-{pod}"
        shutil.rmtree(folder, ignore_errors=True)
        volumes = {one["name"]: one for one in self.workload["spec"]["template"]["spec"]["volumes"]}
        for mount in self._container["volumeMounts"]:
            place = Path(f"{folder}{mount['mountPath']}")
            volume = volumes.get(mount["name"], {})
            if "configMap" in volume:
                files = config_map(self.overlay, volume["configMap"]["name"].rpartition("-")[0])
            elif "secret" in volume:
                files = self._secret(volume["secret"]["secretName"], address)
            else:
                files = {}
            if part := mount.get("subPath"):
                place, files = place.parent, {place.name: files[part]}
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (place / name).write_text(self._here(text, folder, address))
        return folder

    def _secret(self, name: str, address: str) -> dict[str, str]:
        if name == CERTIFICATE:
            made = self.machine.ca.issue_cert(address)
            return {
                "tls.crt": made.cert_chain_pems[0].bytes().decode(),
                "tls.key": made.private_key_pem.bytes().decode(),
                "ca.crt": self.machine.ca.cert_pem.bytes().decode(),
            }
        return {path.name: path.read_text() for path in self.secrets[name].iterdir()}

    def _environment(self, pod: int) -> dict[str, str]:
        found = {}
        for one in self._container["env"]:
            match one:
                case {"name": name, "value": value}:
                    found[name] = value
                case {"name": name, "valueFrom": {"fieldRef": _}}:
                    found[name] = f"nats-{pod}"
                case {"name": name, "valueFrom": {"configMapKeyRef": {"name": full, "key": key}}}:
                    found[name] = config_map(self.overlay, full.rpartition("-")[0])[key]
                case {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}:
                    found[name] = self._ported((self.secrets[secret] / key).read_text())
        return found

    def _here(self, text: str, folder: Path, address: str) -> str:
        for path in ("/etc/nats/", "/run/nats/", "/data"):
            text = text.replace(f'"{path}', f'"{folder}{path}') if '"' in text else text.replace(path, f"{folder}{path}")
        for pod, other in enumerate(self.addresses):
            text = text.replace(f"nats-{pod}.nats-headless", other)
        return self._ported(text.replace("0.0.0.0", address))

    def _ported(self, text: str) -> str:
        for port, here in self.machine.ports.items():
            text = text.replace(f":{port}", f":{here}")
        return text


def _page(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


def _well(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(_page(url))
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
