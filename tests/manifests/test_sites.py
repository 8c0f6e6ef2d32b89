"""Home, a site and a near site for real: nats-servers from what their overlays render, with the README's commands' Secrets."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import textwrap
import tomllib
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from manifests import secrets
from manifests.pods import BINARIES, BusPods, Machine
from manifests.rendered import FOLDER, config_map, of_kind, pod_specs
from support.waiting import until
from towline.access.identity import as_role, store_as
from towline.access.roles import ROLES
from towline.bus.client import Bus
from towline.bus.topology import BUCKETS, CONTROL, DEAD, OUTCOME, PARTIAL, POLICY, TRAJECTORY, Topology
from towline.cli.sites import sites
from towline.config import BusSettings, load_settings
from towline.contract.task import TRAIN
from towline.errors import UsageError

RUN = tomllib.loads((FOLDER / "overlays/prod/run.toml").read_text())["run"]["name"]


class Clusters:
    """The buses of home, of a site of its own and of a near one, and how their services come to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        machine = Machine(folder)
        (folder / "keys-prod").mkdir()
        (folder / "keys-prod/ca.crt").write_bytes(machine.ca.cert_pem.bytes())
        door = machine.address(0, 0)
        at_home = secrets.made(folder, "prod", secrets.PROD_BLOCK)
        at_home |= secrets.made(folder, "door", secrets.DOOR_BLOCK, leaf=door)
        self.home = BusPods(machine, "overlays/home", 0, at_home)
        self.site = BusPods(machine, "overlays/site-b", 1, secrets.made(folder, "site", secrets.SITE_BLOCK, leaf=door))
        self.near = BusPods(machine, "overlays/near", 2, secrets.made(folder, "near", secrets.NEAR_BLOCK, leaf=door))

    def environment(self, pods: BusPods, role: str) -> dict[str, str]:
        """The role's container's, but for addresses and where its Secret lies. Who has none there comes from home's keys."""
        keys = pods.secrets.get(f"towline-{role}", self.folder / "keys-prod")
        return config_map(pods.overlay, "towline-environment") | {
            "TOWLINE_BUS__URL": pods.url,
            "TOWLINE_BUS__KEYS_FOLDER": str(keys),
            "TOWLINE_BUS__TLS_CA": str(keys / "ca.crt"),
            "TOWLINE_BUS__BUDGET_BYTES": str(64 << 20),
            "TOWLINE_STORE__URL": (self.folder / f"store-{pods.cluster}").as_uri(),
        }

    async def init(self, pods: BusPods) -> None:
        """As the Job does: started again where it failed, since three servers that are up don't know of each other at once."""
        toml = self.folder / "run.toml"
        toml.write_text(config_map(pods.overlay, "towline-run")["run.toml"])
        (container,) = dict(pod_specs(pods.overlay))["init"]["containers"]
        command = [BINARIES / "towline", *(str(toml) if one == "/config/run.toml" else one for one in container["args"])]
        environment = os.environ | self.environment(pods, "init")

        async def done() -> bool:
            job = await asyncio.create_subprocess_exec(*command, env=environment, stdout=PIPE, stderr=STDOUT)
            told, _ = await job.communicate()
            assert job.returncode == 0 or b"no suitable peers" in told, told.decode()
            return job.returncode == 0

        await until(done, 60)

    @asynccontextmanager
    async def connected(self, pods: BusPods, role: str) -> AsyncIterator[Bus]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "path", list(sys.path))
            for name, value in self.environment(pods, role).items():
                patched.setenv(name, value)
            settings = as_role(load_settings(self.folder / "run.toml"), role)
        bus = await Bus.connect(settings.bus, run=settings.run.name, client_name=role, patience_seconds=30)
        try:
            yield bus
        finally:
            await bus.close()


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Clusters:
    return Clusters(tmp_path_factory.mktemp("clusters"))


async def test_what_other_clusters_generate_stands_at_home_and_they_may_no_more_than_at_home(clusters: Clusters) -> None:
    three = clusters
    async with three.home.running(), three.site.running(), three.near.running():

        async def joined() -> bool:
            return len(await three.home.leaf_connections()) == len(three.site.addresses) + len(three.near.addresses)

        await until(joined, 60)
        assert set(await three.home.leaf_connections()) == {"towline"}
        for pods in (three.site, three.home):  # a source looks for the other side once, and then ten seconds later
            await three.init(pods)
        async with (
            three.connected(three.home, "viewer") as reader,
            three.connected(three.site, "rollout-worker") as far,
            three.connected(three.near, "rollout-worker") as near,
        ):
            for number in range(8):
                assert (await far.create(far.topology.trajectory(number, 0), b"far")).won
            assert await _samples(far) == {b"far": 8}, "the site's own stream"
            for number in range(8):
                assert (await near.create(near.topology.trajectory(number, 1), b"near")).won

            async def both() -> bool:
                return (await reader.stream_state(TRAJECTORY)).messages == 16

            await until(both, 90)
            assert await _samples(reader) == {b"far": 8, b"near": 8}
            assert await _samples(far) == {b"far": 8}
            for worker in (far, near):
                with pytest.raises(UsageError):
                    await worker.publish(worker.topology.control("end"), b"not a worker's to say")
            assert (await reader.stream_state(CONTROL)).messages == 0
            lane = await near.consumer(near.topology.lane_consumer(TRAIN, 4))
            async with three.connected(three.home, "buffer") as buffer:
                await buffer.publish(buffer.topology.task(TRAIN), b"home's")

            async def fetched() -> bool:
                return [delivery.data for delivery in await lane.fetch(4, 1.0)] == [b"home's"]

            await until(fetched, 60)


@pytest.mark.slow
async def test_a_site_gets_the_tasks_that_are_for_it(clusters: Clusters) -> None:
    """The site's mirror asks again after 10, 20, 30 s where it found nobody at first."""
    async with clusters.home.running(), clusters.site.running():
        for pods in (clusters.home, clusters.site):
            await clusters.init(pods)
        async with (
            clusters.connected(clusters.home, "buffer") as buffer,
            clusters.connected(clusters.site, "rollout-worker") as far,
        ):
            await buffer.publish(buffer.topology.task(TRAIN), b"home's")
            await buffer.publish(buffer.topology.task(TRAIN, site=far.topology.site), b"the site's")
            lane = await far.consumer(far.topology.lane_consumer(TRAIN, 4))
            got: list[bytes] = []

            async def fetched() -> bool:
                got.extend(delivery.data for delivery in await lane.fetch(4, 1.0))
                return bool(got)

            await until(fetched, 120)
            assert got == [b"the site's"]


async def _samples(bus: Bus) -> dict[bytes, int]:
    """As worker or viewer: single messages by sequence. What they are -> how many."""
    state = await bus.stream_state(TRAJECTORY)
    found: dict[bytes, int] = {}
    for sequence in range(1, state.last_sequence + 1):
        data = (await bus.get(TRAJECTORY, sequence)).data
        found[data] = found.get(data, 0) + 1
    return found


@pytest.mark.parametrize("overlay", ["home", "site-b", "near"])
def test_the_readme_makes_every_secret_of_a_cluster(clusters: Clusters, overlay: str) -> None:
    made = {"home": clusters.home, "site-b": clusters.site, "near": clusters.near}[overlay].secrets
    _check_secrets(f"overlays/{overlay}", made, tls=True)
    (monitor,) = of_kind(f"overlays/{overlay}", "PodMonitor").values() or [None]
    if monitor:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        named = endpoint["authorization"]["credentials"]
        assert (made[named["name"]] / named["key"]).is_file()


def test_the_readme_makes_every_secret_of_dev(tmp_path: Path) -> None:
    _check_secrets("overlays/dev", secrets.made(tmp_path, "dev", secrets.DEV_BLOCK), tls=False)
    prefix = config_map("overlays/dev", "towline-environment")["TOWLINE_STORE__URL"].rpartition("/")[2]
    assert f"--prefix {prefix}" in secrets.block(secrets.DEV_BLOCK)


def _check_secrets(overlay: str, made: Mapping[str, Path], *, tls: bool) -> None:
    """Each that a pod mounts is made, and a role's has what its process looks for under its own name."""
    for name, spec in pod_specs(overlay):
        for volume in spec["volumes"]:
            if (secret := volume.get("secret", {}).get("secretName")) not in (None, "nats-tls"):
                assert secret in made, f"{name}: {secret}"
        if name in ROLES:
            files = {path.name for path in made[f"towline-{name}"].iterdir()}
            wanted = {f"{name}.nk", f"{name}.s3-access", f"{name}.s3-secret", "service.token"}
            assert files == wanted | ({"ca.crt"} if tls else set()) | ({"tenant.token"} if name == "gateway" else set())


def test_a_site_is_told_the_same_as_home() -> None:
    home, site = (config_map(f"overlays/{name}", "towline-environment") for name in ("home", "site-b"))
    assert len({config_map(f"overlays/{name}", "towline-run")["run.toml"] for name in ("home", "site-b", "near")}) == 1
    assert site["TOWLINE_BUS__SITE"] in tomllib.loads(f"it = {home['TOWLINE_BUS__SITES']}")["it"]
    assert site["TOWLINE_BUS__SITES"] == home["TOWLINE_BUS__SITES"]
    for key in ("URL", "ENDPOINT"):
        assert site[f"TOWLINE_STORE__BLOBS_{key}"] == home[f"TOWLINE_STORE__{key}"], "large payloads go to home's store"
    assert (home["TOWLINE_STORE__URL"], home["TOWLINE_STORE__ENDPOINT"]) != (
        site["TOWLINE_STORE__URL"],
        site["TOWLINE_STORE__ENDPOINT"],
    )


def test_the_servers_domains_are_those_by_which_the_streams_find_each_other() -> None:
    site = config_map("overlays/site-b", "towline-environment")["TOWLINE_BUS__SITE"]
    for overlay, domain in (("home", BusSettings().home_domain), ("site-b", site)):
        (spec,) = [spec for name, spec in pod_specs(f"overlays/{overlay}") if name == "nats"]
        (given,) = [one for one in spec["containers"][0]["env"] if one["name"] == "NATS_DOMAIN"]
        key = given.get("valueFrom", {}).get("configMapKeyRef", {}).get("key", "")
        assert (given.get("value") or config_map(f"overlays/{overlay}", "towline-environment")[key]) == domain
        assert "domain: $NATS_DOMAIN" in config_map(f"overlays/{overlay}", "nats")["nats.conf"]


def test_what_the_sites_connection_carries_is_what_towline_access_sites_writes(clusters: Clusters) -> None:
    """The Secrets' fragments against the topology of the run that the overlays' file names, and the pods' paths and ports."""
    fragment = (clusters.site.secrets["towline-leaf"] / "leaf.conf").read_text()
    door = (clusters.home.secrets["towline-leaf"] / "leaf.conf").read_text()
    names = Topology(RUN)
    denied = fragment.split("deny_imports: [")[1]
    for spec in (TRAJECTORY, OUTCOME, PARTIAL, DEAD):
        assert denied.count(f'"{names.subject(spec.subjects[0])}"') == 2, "neither way"
    for spec in (CONTROL, POLICY):
        assert denied.count(f'"{names.subject(spec.subjects[0])}"') == 1, "home's, which the site copies"
    for bucket in BUCKETS:
        assert denied.count(f'"$KV.{names.bucket(bucket)}.>"') == 2
    (port,) = re.findall(r'listen: "0\.0\.0\.0:(\d+)"', door)
    (spec,) = [spec for name, spec in pod_specs("overlays/home") if name == "nats"]
    assert {"name": "leaf", "containerPort": int(port)} in spec["containers"][0]["ports"]
    (listed,) = of_kind("overlays/home", "Service")["nats-leaf"]["spec"]["ports"]
    assert (listed["port"], listed["targetPort"]) == (int(port), "leaf")
    assert f":{port}" in fragment.split("url: ")[1].splitlines()[0]
    for text, overlay in ((door, "home"), (fragment, "site-b")):
        (spec,) = [spec for name, spec in pod_specs(f"overlays/{overlay}") if name == "nats"]
        mounted = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        paths = re.findall(r'_file: "([^"]+)"', text)
        assert paths, "both are encrypted"
        assert {path.rpartition("/")[0] for path in paths} <= mounted
    (variable,) = re.findall(r"nkey: \$(\w+)", fragment)
    assert variable in {one["name"] for one in spec["containers"][0]["env"]}


def test_a_site_mirrors_homes_versions_into_the_store_that_its_workers_read(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    overlay = "overlays/site-b"
    shared = config_map(overlay, "towline-environment")
    specs = dict(pod_specs(overlay))
    (container,) = specs["mirror"]["containers"]
    environment = shared | {one["name"]: shared[one["valueFrom"]["configMapKeyRef"]["key"]] for one in container["env"]}
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], one) for one in container["args"]]
    assert arguments[:3] == ["store", "mirror", "/config/run.toml"]
    assert arguments[3] == shared["TOWLINE_STORE__URL"]
    assert arguments[arguments.index("--endpoint") + 1] == shared["TOWLINE_STORE__ENDPOINT"]
    assert "--follow" in arguments
    keys = clusters.site.secrets["towline-mirror"]
    assert {path.name for path in keys.iterdir()} == {
        f"{role}.s3-{half}" for role in ("viewer", "operator") for half in ("access", "secret")
    }
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    toml = tmp_path / "run.toml"
    toml.write_text(config_map(overlay, "towline-run")["run.toml"])
    source = load_settings(toml).store
    home = config_map("overlays/home", "towline-environment")
    assert (source.url, source.endpoint) == (home["TOWLINE_STORE__URL"], home["TOWLINE_STORE__ENDPOINT"])
    # Home's keys for home's store, the site's for the site's.
    viewer = store_as(source.model_copy(update={"keys_folder": str(keys)}), "viewer")
    assert viewer.keys[0] == (clusters.folder / "keys-prod/viewer.s3-access").read_text().strip()
    operator = (keys / "operator.s3-access").read_text()
    assert operator == (clusters.folder / "keys-b/operator.s3-access").read_text()
    assert operator != (clusters.folder / "keys-prod/operator.s3-access").read_text()


def test_the_readmes_certificate_has_every_name_that_a_server_is_called_by() -> None:
    certificate = yaml.safe_load(textwrap.dedent(secrets.block("kind: Certificate")))["spec"]
    for overlay, bus in (("home", "nats"), ("site-b", "nats"), ("near", "nats-leaf")):
        url = config_map(f"overlays/{overlay}", "towline-environment")["TOWLINE_BUS__URL"]
        routes = re.findall(r'"tls://([\w.-]+):6222"', config_map(f"overlays/{overlay}", bus)["nats.conf"])
        assert len(routes) == (0 if overlay == "near" else 3)
        for name in [url.removeprefix("tls://").rpartition(":")[0], *routes]:
            assert any(fnmatch(name, pattern) for pattern in certificate["dnsNames"]), name
        assert certificate["secretName"] in str(dict(pod_specs(f"overlays/{overlay}"))["nats"]["volumes"])
    assert {"server auth", "client auth"} <= set(certificate["usages"]), "routes are verified on both sides"


def test_a_door_with_half_a_certificate_is_refused(tmp_path: Path) -> None:
    for half in ({"tls_cert": "/tls.crt"}, {"tls_key": "/tls.key"}):
        with pytest.raises(UsageError, match="go together"):
            sites(["one"], ["b"], "tls://home:7422", tmp_path, **half)
    assert not list(tmp_path.iterdir())


def test_replicas_have_their_sites_name_in_theirs() -> None:
    for overlay, expected in (("home", []), ("site-b", ["--replica", "$(TOWLINE_BUS__SITE)-$(POD_NAME)"])):
        (container,) = dict(pod_specs(f"overlays/{overlay}"))["rollout-worker"]["containers"]
        assert container["args"] == ["--config", "/config/run.toml", *expected]
        if expected:
            assert "POD_NAME" in {one["name"] for one in container["env"]}


def test_a_site_has_what_works_while_it_is_cut_off_and_nothing_that_decides() -> None:
    for overlay, deployments, jobs in (
        ("site-b", {"rollout-worker", "mirror"}, {"init", "gc"}),
        ("near", {"rollout-worker", "reward", "nats"}, set()),
    ):
        assert set(of_kind(f"overlays/{overlay}", "Deployment")) == deployments
        assert set(of_kind(f"overlays/{overlay}", "Job", "CronJob")) == jobs
        assert set(of_kind(f"overlays/{overlay}", "StatefulSet")) == {"nats"} - deployments
        kinds = {one["spec"].get("type", "ClusterIP") for one in of_kind(f"overlays/{overlay}", "Service").values()}
        assert kinds == {"ClusterIP"}, "a site only dials out"
