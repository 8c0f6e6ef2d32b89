"""Which pod reaches what: the tables are written by hand, from what each part does."""

from __future__ import annotations

import pytest

from manifests.network import End, own_namespace, pod, reaches
from manifests.rendered import OVERLAYS, pod_specs

DNS = End({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
MONITORING = End({}, {"kubernetes.io/metadata.name": "monitoring"})
STRANGER = End({"app": "stranger"}, {"kubernetes.io/metadata.name": "elsewhere"})
ANYWHERE = End(address="8.8.8.8")
HOME_STORE, DOOR = End(address="203.0.113.9"), End(address="203.0.113.7")
SITE_STORE = End(address="192.0.2.1")
SITE_B, OTHER_SITE = End(address="198.51.100.20"), End(address="198.51.99.20")
SERVERS = {"nats", "store"}
OUTSIDE = {"prod": HOME_STORE, "home": HOME_STORE, "site-b": SITE_STORE, "near": SITE_STORE}
HOME = {"dev", "prod", "home"}


def folder(overlay: str) -> str:
    return f"overlays/{overlay}"


def towlines(overlay: str) -> list[str]:
    return [name for name, _ in pod_specs(folder(overlay)) if name not in SERVERS]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_part_reaches_bus_store_and_names(overlay: str) -> None:
    at = folder(overlay)
    nats = pod(at, "nats")
    for name in [*towlines(overlay), *(name for name, _ in pod_specs(at) if name in SERVERS)]:
        assert reaches(at, pod(at, name), DNS, 53, "UDP"), name
    for name in towlines(overlay):
        assert reaches(at, pod(at, name), nats, 4222), name
        store, port = (pod(at, "store"), 8333) if overlay == "dev" else (OUTSIDE[overlay], 443)
        assert reaches(at, pod(at, name), store, port), name
        assert reaches(at, pod(at, name), MONITORING, 4318), "traces"
        assert reaches(at, MONITORING, pod(at, name), 8080), "metrics"
    if overlay in ("prod", "home", "site-b"):
        assert reaches(at, nats, nats, 6222), "the bus's servers among themselves"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nobody_else_reaches_anything(overlay: str) -> None:
    at = folder(overlay)
    for name, _ in pod_specs(at):
        here = pod(at, name)
        for port in (22, 80, 443, 4222, 6222, 7422, 8000, 8001, 8080, 8222, 8333):
            assert not reaches(at, STRANGER, here, port), (name, port)
            assert not reaches(at, ANYWHERE, here, port), (name, port)
            assert not reaches(at, here, STRANGER, port), (name, port)
            downloads = name == "trainer" and overlay in ("prod", "home") and port == 443
            assert reaches(at, here, ANYWHERE, port) == downloads, (name, port)
    for one in towlines(overlay):
        for other in towlines(overlay):
            for port in (8000, 8001, 8080):
                assert not reaches(at, pod(at, one), pod(at, other), port), (one, other)
        assert not reaches(at, pod(at, one), pod(at, "nats"), 8222), "the monitor's page"
        assert not reaches(at, pod(at, one), pod(at, "nats"), 6222), "the servers' own port"


def test_the_trainer_reaches_no_private_address_by_its_way_to_the_hub() -> None:
    for address in ("10.0.0.1", "169.254.169.254", "172.20.0.1", "192.168.1.1", "100.64.0.1"):
        assert not reaches(folder("prod"), pod(folder("prod"), "trainer"), End(address=address), 443)


def test_a_site_has_two_ways_out_and_no_way_in() -> None:
    at = folder("site-b")
    assert reaches(at, pod(at, "nats"), DOOR, 7422)
    assert not reaches(at, pod(at, "nats"), HOME_STORE, 7422), "the door alone"
    assert not reaches(at, pod(at, "nats"), DOOR, 443)
    for name in towlines("site-b"):
        assert reaches(at, pod(at, name), HOME_STORE, 443) == (name in {"mirror", "rollout-worker"}), name
        assert not reaches(at, pod(at, name), DOOR, 7422), name
    for name, _ in pod_specs(at):
        for port in (4222, 7422, 8080):
            assert not reaches(at, DOOR, pod(at, name), port), name


def test_a_near_site_has_the_leafs_way_out_alone() -> None:
    at = folder("near")
    assert reaches(at, pod(at, "nats"), DOOR, 7422)
    for name in towlines("near"):
        assert not reaches(at, pod(at, name), DOOR, 7422), name
        assert not reaches(at, pod(at, name), HOME_STORE, 443), name


def test_homes_door_is_open_for_the_site_alone() -> None:
    at = folder("home")
    assert reaches(at, SITE_B, pod(at, "nats"), 7422)
    assert not reaches(at, OTHER_SITE, pod(at, "nats"), 7422)
    for port in (4222, 6222, 8222):
        assert not reaches(at, SITE_B, pod(at, "nats"), port)
    assert not reaches(folder("prod"), SITE_B, pod(folder("prod"), "nats"), 7422)


@pytest.mark.parametrize("overlay", sorted(HOME))
def test_the_gateway_serves_whoever_has_the_label(overlay: str) -> None:
    at = folder(overlay)
    labelled = {"towline/clients": "true"}
    for caller in (End(labelled, own_namespace(at)), End({}, {"kubernetes.io/metadata.name": "apps"} | labelled)):
        assert reaches(at, caller, pod(at, "gateway"), 8000)
        assert reaches(at, caller, pod(at, "gateway"), 8001)
        assert not reaches(at, caller, pod(at, "gateway"), 8080)
        assert not reaches(at, caller, pod(at, "buffer"), 8080)
    assert not reaches(at, End({}, own_namespace(at)), pod(at, "gateway"), 8000)
