"""The services that one run has on this machine, as commands: what is started, with which environment, in which order."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from towline.config import Settings
from towline.local.ports import KeptPorts
from towline.local.run_directory import RunDirectory

MODULES = {
    "buffer": "towline.buffer",
    "rollout_worker": "towline.rollout_worker",
    "reward": "towline.reward",
    "trainer": "towline.trainer",
    "publisher": "towline.publisher",
    "gateway": "towline.gateway",
}
"""In the order in which data flows."""
STOP_ORDER = ("gateway", "rollout_worker", "trainer", "reward", "publisher", "buffer")
"""Who makes work stops before who takes it."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One process: `process` names it in logs and process tables, `service` says what it is."""

    service: str
    replica: str
    command: tuple[str, ...]
    environment: dict[str, str]
    ports: KeptPorts | None = None

    @property
    def process(self) -> str:
        return self.service if self.replica == "0" else f"{self.service}-{self.replica}"


def service_specs(directory: RunDirectory, settings: Settings, source: Path) -> list[ServiceSpec]:
    """Every service process of the run, in the order of their start."""
    specs = []
    for service in MODULES:
        for index in range({"rollout_worker": settings.rollout.replicas, "gateway": settings.gateway.replicas}.get(service, 1)):
            threads = {"rollout_worker": settings.rollout.threads, "trainer": settings.trainer.threads}.get(service, 1)
            command = (sys.executable, "-m", MODULES[service], "--config", str(directory.settings_path), "--replica", str(index))
            ports = _open_ports(settings) if service == "gateway" else None
            specs.append(ServiceSpec(service, str(index), command, service_environment(source, threads), ports))
    return specs


def _open_ports(settings: Settings) -> KeptPorts:
    """Those that a gateway chooses itself."""
    gateway = settings.gateway
    chosen = {"api_port": gateway.port == 0, "grpc_port": gateway.grpc_port == 0}
    return KeptPorts(gateway.host, tuple(name for name, it in chosen.items() if it))


def service_environment(source: Path, threads: int) -> dict[str, str]:
    """The caller's, without the settings in it: settings.toml has taken them in, and they must not win over --set."""
    environment = {name: value for name, value in os.environ.items() if not (name.startswith("TOWLINE_") and "__" in name)}
    folders = [str(source.resolve().parent), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
