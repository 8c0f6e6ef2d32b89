"""What the compose files promise, without a Docker engine; tests/compose runs them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests.compose_file import FOLDER, OVERRIDES, load, services
from towline.access import roles
from towline.config import Settings
from towline.local.services import MODULES

SERVICES = {name.replace("_", "-") for name in MODULES}
ONE_SHOT = {"access", "init", "load", "tools", "store-users"}
SETTLE_SECONDS = 10.0
"""What a service takes at most after its drain: the work is cancelled, the lease released, the last figures told."""
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
FILES = [("compose.yaml",), *[("compose.yaml", name) for name in OVERRIDES]]
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def every(*files: str) -> list[tuple[str, dict[str, Any]]]:
    return list(services(*files, environment=KEYS).items())


@pytest.mark.parametrize("name", ["compose.yaml", *OVERRIDES])
def test_the_file_is_a_compose_file(name: str) -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [checker, "--builtin-schema", "vendor.compose-spec", FOLDER / name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_towlines_services_are_there_under_the_names_that_bus_and_code_have() -> None:
    found = services()
    assert set(found) >= SERVICES
    assert set(roles.SERVICES) == SERVICES
    for name in SERVICES:
        assert found[name]["build"]["target"] == name
        assert re.search(rf"^FROM service[\w-]* AS {name}$", DOCKERFILE, re.MULTILINE), name
        assert f'"-m", "towline.{name.replace("-", "_")}"' in DOCKERFILE.split(f" AS {name}\n")[1].split("FROM ")[0]
        assert "profiles" not in found[name], "part of a plain `up`"


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_every_image_is_pinned(files: tuple[str, ...]) -> None:
    for name, service in every(*files):
        repository, _, tag = service["image"].rpartition(":")
        if repository.startswith("towline/"):
            continue
        assert repository, f"{name} has no tag"
        assert re.search(r"\d+\.\d+\.\d+|\d+\.\d+|RELEASE\.\d{4}", tag), f"{name}: {tag} may become another image"
    for argument, image in re.findall(r"^ARG (\w+_IMAGE)=(\S+)", DOCKERFILE, re.MULTILINE):
        assert re.search(r":v?\d+\.\d+\.\d+", image), argument


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_nothing_listens_beyond_this_machine(files: tuple[str, ...]) -> None:
    for name, service in every(*files):
        assert service.get("network_mode") in (None, "none"), name
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), f"{name} publishes {port}"


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_no_container_has_more_rights_than_it_needs(files: tuple[str, ...]) -> None:
    for name, service in every(*files):
        user = service["user"].split(":")[0]
        assert user.isdecimal(), name
        assert int(user) > 0, name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not {"privileged", "cap_add", "pid", "ipc", "devices"} & set(service), name
        assert service["init"] is True, f"{name}: its first process must pass signals on"


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_whatever_stays_up_has_a_health_check(files: tuple[str, ...]) -> None:
    for name, service in every(*files):
        assert (service["restart"] == "no") == (name in ONE_SHOT), name
        if name not in ONE_SHOT | {"gc"}:  # a loop of the command line, without a port
            assert service["healthcheck"]["test"][0] == "CMD", name


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_each_container_has_its_own_roles_keys_alone(files: tuple[str, ...]) -> None:
    for name, service in every(*files):
        if name == "access":
            continue
        keys = [volume.split(":") for volume in service.get("volumes", []) if volume.startswith("access-")]
        role = {"tools": "all", "store-users": "store", "prometheus": "observe", "grafana": "observe"}.get(name)
        role = role or name.removesuffix("-gpu")
        assert {volume for volume, *_ in keys} <= {f"access-{role}"}, name
        assert all(mode == "ro" for *_, mode in keys), name


def test_prometheus_scrapes_every_service_by_its_name_with_the_token() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    found = {job["dns_sd_configs"][0]["names"][0] for job in jobs}
    assert found == {
        name for name, service in every("compose.yaml") if "towline.runtime.probe" in str(service.get("healthcheck"))
    }
    for job in jobs:
        assert job["job_name"] == f"towline-{job['dns_sd_configs'][0]['names'][0]}"
        assert job["dns_sd_configs"][0]["port"] == int(services()["buffer"]["environment"]["TOWLINE_SERVICE__PORT"])
        assert job["authorization"]["credentials_file"] == "/access/service.token"


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_every_file_that_is_mounted_exists(files: tuple[str, ...]) -> None:
    for name, service in every(*files):
        for volume in service.get("volumes", []):
            if volume.startswith("."):
                assert (FOLDER / volume.split(":")[0]).exists(), f"{name}: {volume}"


def test_seaweedfs_shows_others_nothing_but_what_asks_for_keys() -> None:
    """tests/compose knocks at it."""
    store = services()["store"]
    assert [word for word in store["command"] if re.match(r"-(\w+\.)?ip(\.bind)?=(?!127\.0\.0\.1$)", word)] == [
        "-s3.ip.bind=0.0.0.0"
    ]
    given = (FOLDER / "access.sh").read_text()
    for variable in ("WEED_GRPC_CA", "WEED_GRPC_S3_CERT", "WEED_GRPC_S3_KEY"):
        assert store["environment"][variable].removeprefix("/access/") in given


def test_a_standby_is_healthy() -> None:
    for name in SERVICES:
        assert services()[name]["healthcheck"]["test"][-1] == "/readyz?standbyok=true"


def test_the_gateways_ports_are_published() -> None:
    gateway = services()["gateway"]
    inside = {gateway["environment"][f"TOWLINE_GATEWAY__{name}"] for name in ("PORT", "GRPC_PORT")}
    assert {port.rpartition(":")[2] for port in gateway["ports"]} == inside
    assert "dependencies.py gateway" in DOCKERFILE, "gRPC's packages"


def test_every_environment_name_is_a_setting() -> None:
    for name, service in every("compose.yaml"):
        for variable in service.get("environment", {}):
            if not variable.startswith("TOWLINE_"):
                continue
            section, _, key = variable.removeprefix("TOWLINE_").lower().partition("__")
            assert section in Settings.model_fields, f"{name}: {variable}"
            model: Any = Settings.model_fields[section].annotation
            assert key in model.model_fields, f"{name}: {variable}"


@pytest.mark.parametrize("files", FILES, ids=lambda files: files[-1])
def test_no_service_starts_before_the_store_has_kept_its_word(files: tuple[str, ...]) -> None:
    found = dict(every(*files))
    for name in SERVICES | {"gc"}:
        waits = {one: how["condition"] for one, how in found[name]["depends_on"].items()}
        assert waits["init"] == "service_completed_successfully", name
        assert waits["nats"] == waits["store"] == "service_healthy", f"{name} stops before them"
    assert found["init"]["command"][0] == "init"


def test_another_run_gets_servers_that_know_its_users() -> None:
    before, after = (services(environment={"TOWLINE_RUN": run}) for run in ("demo", "other"))
    for name in ("access", "nats", "store", "init", *SERVICES):
        assert before[name] != after[name], f"{name} would stay as it is"


def test_a_container_is_given_longer_to_stop_than_its_service_takes() -> None:
    for name in SERVICES:
        service = services()[name]
        drain = float(service["environment"]["TOWLINE_SERVICE__DRAIN_SECONDS"])
        grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
        assert grace is not None
        assert float(grace[1]) >= drain + SETTLE_SECONDS, name


def test_the_access_job_mounts_every_volume_of_keys_where_the_image_has_a_folder() -> None:
    mounted = dict(volume.split(":")[:2] for volume in services()["access"]["volumes"] if not volume.startswith("./"))
    folders = set((FOLDER / "folders.txt").read_text().split())
    declared = set(load()["volumes"])
    assert set(mounted) == declared
    assert set(mounted.values()) <= folders


@pytest.mark.parametrize("flavour", ["seaweedfs", "minio", "shared"])
def test_the_access_job_gives_each_role_its_own_keys_and_keeps_them(tmp_path: Path, flavour: str) -> None:
    for folder in (FOLDER / "folders.txt").read_text().split():
        (tmp_path / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "ROOT": str(tmp_path), "RUN": "demo", "BUCKET": "towline", "PREFIX": "runs", "STORE_FLAVOUR": flavour,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip

    def run() -> dict[str, bytes]:
        subprocess.run(["sh", FOLDER / "access.sh"], env=environment, check=True, capture_output=True, timeout=60)
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in (tmp_path / "access").rglob("*") if path.is_file()}

    first = run()
    secrets = {path for path in first if not path.endswith((".policy.json", "nats.conf", "apply.sh"))}
    for path in secrets:
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) & 0o077 == 0, path
    for role in SERVICES:
        own = {Path(path).name for path in first if path.startswith(f"access/{role}/")}
        assert own - {"tenant.token"} == {f"{role}.nk", f"{role}.s3-access", f"{role}.s3-secret", "service.token"}
    seeds = [data.strip() for path, data in first.items() if path.endswith(".nk")]
    assert len(seeds) > len(SERVICES)
    assert not any(seed in first["access/nats/nats.conf"] for seed in seeds)
    assert run() == first
