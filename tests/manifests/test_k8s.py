"""What the Kubernetes manifests promise, rendered offline: valid, pinned, without rights, probed, with the code's names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from manifests.rendered import FOLDER, OVERLAYS, config_map, of_kind, pod_specs, rendered
from towline.access import roles
from towline.config import BusSettings, Settings, load_settings
from towline.local.services import MODULES

CLUSTER = "1.31"
SERVICES = {name.replace("_", "-") for name in MODULES}
HOME = ("dev", "prod", "home")
SITES = {"site-b": {"rollout-worker", "mirror"}, "near": {"rollout-worker", "reward", "nats"}}
"""Other clusters, and the Deployments there."""
PORTLESS = {"mirror"}
"""Has nothing to probe; its manifest says why."""
OTHERS = {"towline-leaf", "towline-home", "nats-tls"}
"""Secrets that aren't a role's; which pods may mount them: `MAY_MOUNT`."""
MAY_MOUNT = {"nats": {"towline-leaf", "nats-tls"}, "rollout-worker": {"towline-home"}}
CLUSTER_WIDE = {"Namespace"}
SETTLE_SECONDS = 10.0
"""As in test_compose.py."""
CUSTOM = {"ScaledObject", "PodMonitor", "PrometheusRule"}


SINGLE = {"nats", "store"}
"""Of dev: one server each, which goes when its node does."""
LEASED = {"buffer", "trainer"}
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def size(text: str) -> int:
    """Bytes."""
    return int(text[:-2]) * UNITS[text[-2:]]


def folder(overlay: str) -> str:
    return f"overlays/{overlay}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_is_valid(overlay: str) -> None:
    checked = 0
    for resource in rendered(folder(overlay)):
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, CLUSTER, strict=True)
            checked += 1
        assert bool(resource["metadata"].get("namespace")) == (resource["kind"] not in CLUSTER_WIDE), resource["metadata"]["name"]
    assert checked >= 8


@pytest.mark.parametrize("overlay", HOME)
def test_towlines_services_are_there_under_the_names_that_bus_and_code_have(overlay: str) -> None:
    deployments = of_kind(folder(overlay), "Deployment")
    assert set(deployments) == SERVICES == set(roles.SERVICES)
    for name, deployment in deployments.items():
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["name"] == name
        image = container["image"].split(":")[0].removesuffix("-gpu")
        assert image.endswith(f"towline/{name}")
        assert container["args"] == ["--config", "/config/run.toml"]
    assert set(of_kind(folder(overlay), "Job")) == {roles.INIT}
    assert set(of_kind(folder(overlay), "CronJob")) == {roles.GC}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_image_is_pinned(overlay: str) -> None:
    for name, spec in pod_specs(folder(overlay)):
        for container in spec["containers"]:
            tag = container["image"].rpartition(":")[2]
            assert re.search(r"\d+\.\d+", tag) or (overlay == "dev" and tag == "dev"), f"{name}: {container['image']}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_has_more_rights_than_it_needs(overlay: str) -> None:
    for name, spec in pod_specs(folder(overlay)):
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True, name
        assert security["runAsUser"] > 0, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }, name  # fmt: skip


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_pod_has_its_own_roles_keys_alone(overlay: str) -> None:
    for name, spec in pod_specs(folder(overlay)):
        secrets = {volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume}
        assert secrets - OTHERS == {f"towline-{name}"}
        assert secrets & OTHERS <= MAY_MOUNT.get(name, set()), name
        for volume in spec["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440, name
        for container in spec["containers"]:
            assert not [one for one in container.get("env", []) if "KEY" in one["name"] and "value" in one], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_whatever_stays_up_is_probed_and_has_its_share_of_the_machine(overlay: str) -> None:
    for name, workload in of_kind(folder(overlay), "Deployment", "StatefulSet").items():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe") if name not in PORTLESS else ():
            assert len({"exec", "httpGet", "grpc"} & set(container[probe])) == 1, f"{name}: {probe}"
            if "grpc" in container[probe]:
                assert container[probe]["grpc"]["port"] in {port["containerPort"] for port in container["ports"]}
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["requests"]), name
        assert "memory" in container["resources"]["limits"], name
        if workload["kind"] == "Deployment" and "startupProbe" in container:
            starts = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
            assert workload["spec"].get("progressDeadlineSeconds", 600) > starts, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_is_given_longer_to_stop_than_its_service_takes(overlay: str) -> None:
    for name, spec in pod_specs(folder(overlay)):
        if name not in SERVICES:
            continue
        (container,) = spec["containers"]
        environment = {one["name"]: one.get("value") for one in container["env"]}
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        drain = float(environment["TOWLINE_SERVICE__DRAIN_SECONDS"]) + float(before[-1])
        assert spec["terminationGracePeriodSeconds"] >= drain + SETTLE_SECONDS, name
        assert spec["shareProcessNamespace"] is True, "a Python as first process reaps nobody"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_a_pod_may_write_to_the_nodes_disk_is_asked_of_the_node(overlay: str) -> None:
    for name, spec in pod_specs(folder(overlay)):
        folders = [volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume]
        room = sum(size(one["sizeLimit"]) for one in folders if one.get("medium") != "Memory")
        (container,) = spec["containers"]
        assert size(container["resources"]["requests"]["ephemeral-storage"]) >= room, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_disruption_leaves_most_of_what_scales_and_holds_up_no_drain(overlay: str) -> None:
    budgets = of_kind(folder(overlay), "PodDisruptionBudget")
    workloads = of_kind(folder(overlay), "Deployment", "StatefulSet")
    assert set(budgets) == {*workloads} - PORTLESS - (SINGLE if overlay == "dev" else set())
    for name, budget in budgets.items():
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        pod = workloads[name]["spec"]["template"]
        assert wanted <= pod["metadata"]["labels"].items(), name
        assert budget["spec"]["maxUnavailable"], name
        # A bus that isn't level with the others is waited for; whoever waits for a lease or a version isn't.
        assert (budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow") == (name != "nats"), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_of_a_kind_stand_on_several_nodes_and_dont_wait_for_a_dead_one(overlay: str) -> None:
    for name, workload in of_kind(folder(overlay), "Deployment", "StatefulSet").items():
        spec, labels = workload["spec"]["template"]["spec"], workload["spec"]["template"]["metadata"]["labels"].items()
        if name not in PORTLESS and not (overlay == "dev" and name in SINGLE):
            spread = spec["topologySpreadConstraints"][0]
            assert spread["topologyKey"] == "kubernetes.io/hostname"
            assert spread["labelSelector"]["matchLabels"].items() <= labels, name
            apart = {"nats"} if workload["kind"] == "StatefulSet" else LEASED if workload["spec"].get("replicas") == 2 else set()
            assert (spread["whenUnsatisfiable"] == "DoNotSchedule") == (name in apart), name
        if name in SERVICES | PORTLESS:
            seconds = {one["key"]: one.get("tolerationSeconds") for one in spec["tolerations"]}
            for gone in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
                assert seconds[gone] == 30, name


@pytest.mark.parametrize("overlay", HOME)
def test_what_holds_a_lease_stops_before_the_next_starts_and_a_standby_is_well(overlay: str) -> None:
    for name in LEASED:
        spec = of_kind(folder(overlay), "Deployment")[name]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert spec["strategy"] == {"type": "Recreate"}, "an old standby would lead between two versions"
        assert spec["replicas"] == (1 if overlay == "dev" else 2)
        probe = container["readinessProbe"]["exec"]["command"][-1]
        assert probe == ("/readyz" if overlay == "dev" else "/healthz"), "a standby is never ready: its rollout would never end"


def test_a_pod_has_the_gpus_that_its_process_counts_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for overlay in ("prod", "home", "site-b", "near"):
        toml = tmp_path / "run.toml"
        toml.write_text(config_map(folder(overlay), "towline-run")["run.toml"])
        for name, spec in pod_specs(folder(overlay)):
            (container,) = spec["containers"]
            found = container["resources"].get("limits", {}).get("nvidia.com/gpu", "0")
            with monkeypatch.context() as patched:
                patched.setattr(sys, "path", list(sys.path))
                for one in container.get("env", []):
                    if one["name"].startswith("TOWLINE_") and "value" in one:
                        patched.setenv(one["name"], one["value"])
                settings = load_settings(toml)
            wanted = {"trainer": settings.trainer.ranks, "rollout-worker": settings.rollout.arguments.get("tp", 1)}.get(name, 0)
            assert int(found) == wanted, name
            if name == "trainer":
                assert (settings.trainer.backend, settings.trainer.device) == ("megatron", "cuda")
            if name == "rollout-worker":
                assert (settings.rollout.engine, settings.rollout.device) == ("sglang", "cuda")
            shared = {volume["name"] for volume in spec["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"}
            assert ("shm" in shared) == (wanted > 0), "ranks and engines share more memory than a container has"


@pytest.mark.parametrize("overlay", ["prod", "home", "site-b", "near"])
def test_a_bus_server_gives_its_leads_away_before_it_stops(overlay: str) -> None:
    (spec,) = [spec for name, spec in pod_specs(folder(overlay)) if name == "nats"]
    (container,) = spec["containers"]
    conf = config_map(folder(overlay), "nats-leaf" if overlay == "near" else "nats")["nats.conf"]
    (pid_file,) = re.findall(r'pid_file: "([^"]+)"', conf)
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["nats-server", f"-sl=ldm={pid_file}"]
    assert Path(pid_file).parent.as_posix() in {mount["mountPath"] for mount in container["volumeMounts"]}
    seconds = sum(int(found) for found in re.findall(r'lame_duck_\w+: "(\d+)s"', conf))
    assert spec["terminationGracePeriodSeconds"] >= seconds + SETTLE_SECONDS
    assert set(re.findall(r'"(/etc/nats/\w+)/', conf)) | {"/etc/nats/access"} <= {
        m["mountPath"] for m in container["volumeMounts"]
    }


@pytest.mark.parametrize("overlay", ["dev", "prod", "home", "site-b"])
def test_the_bus_has_room_for_what_the_run_reserves_and_the_volume_for_the_bus(overlay: str) -> None:
    bus = of_kind(folder(overlay), "StatefulSet")["nats"]["spec"]
    (limit,) = re.findall(r"max_file_store: (\d+)GB", config_map(folder(overlay), "nats")["nats.conf"])
    run = tomllib.loads(config_map(folder(overlay), "towline-run")["run.toml"])
    reserved = run.get("bus", {}).get("budget_bytes", BusSettings().budget_bytes)
    assert reserved <= int(limit) << 30
    assert int(limit) << 30 <= size(bus["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"])
    copies = int(config_map(folder(overlay), "towline-environment").get("TOWLINE_BUS__REPLICAS", "1"))
    assert bus["replicas"] == copies


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_environment_name_is_a_setting_and_the_runs_file_is_one(overlay: str, monkeypatch: Any, tmp_path: Path) -> None:
    shared = config_map(folder(overlay), "towline-environment")
    for name, spec in pod_specs(folder(overlay)):
        own = {one["name"]: referred(overlay, one) for one in spec["containers"][0].get("env", [])}
        for variable in shared | own:
            if variable.startswith("TOWLINE_") and "__" in variable:
                section, _, key = variable.removeprefix("TOWLINE_").lower().partition("__")
                model: Any = Settings.model_fields[section].annotation
                assert key in model.model_fields, f"{name}: {variable}"
        with monkeypatch.context() as patched:
            for variable, value in (shared | own).items():
                if variable.startswith("TOWLINE_"):
                    patched.setenv(variable, value)
            patched.setattr(sys, "path", list(sys.path))
            toml = tmp_path / "run.toml"
            toml.write_text(config_map(folder(overlay), "towline-run")["run.toml"])
            settings = load_settings(toml)
        if name in SERVICES:
            assert settings.service.port == 8080
            assert settings.bus.url, "the bus has an address"
            assert settings.store.url.startswith("s3://")
            mounted = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
            named = [settings.bus.tls_ca.rpartition("/")[0], settings.bus.keys_folder, settings.store.blobs_keys_folder]
            assert {one for one in named if one} <= mounted, name


def referred(overlay: str, variable: dict[str, Any]) -> str:
    """The variable's value; "" where it's the pod's name or in a Secret."""
    match variable:
        case {"value": value}:
            return str(value)
        case {"valueFrom": {"configMapKeyRef": {"name": full, "key": key}}}:
            return config_map(folder(overlay), full.rpartition("-")[0])[key]
    return ""


def test_the_fleet_grows_with_the_slots_that_the_buffer_wants() -> None:
    (scaled,) = of_kind(folder("prod"), "ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"]["name"] == "rollout-worker"
    assert scaled["spec"]["scaleTargetRef"]["name"] in of_kind(folder("prod"), "Deployment")
    (trigger,) = scaled["spec"]["triggers"]
    assert "replicas" not in of_kind(folder("prod"), "Deployment")["rollout-worker"]["spec"], "each apply would set it back"
    assert trigger["metadata"]["ignoreNullValues"] == "false", "a Prometheus that is away is no reason to end workers"
    rules = of_kind(folder("prod"), "PrometheusRule")["wanted-slots"]
    records = {rule["record"]: rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]}
    (name,) = records
    assert f'{name}{{namespace="{scaled["metadata"]["namespace"]}"}}' in trigger["metadata"]["query"]
    toml = (FOLDER / "overlays/prod/run.toml").read_text()
    slots = re.search(r"^slots = (\d+)", toml, re.MULTILINE)
    assert slots is not None
    assert trigger["metadata"]["threshold"] == slots[1], "of one worker"


def test_the_scaling_rule_asks_for_metrics_that_the_buffer_has() -> None:
    from towline.runtime.metrics_catalogue import BUFFER

    rules = of_kind(folder("prod"), "PrometheusRule")["wanted-slots"]
    asked = set(re.findall(r"towline_buffer_(\w+)", str(rules["spec"])))
    assert asked
    assert asked <= {shown.metric for shown in BUFFER}


@pytest.mark.parametrize("conf", ["overlays/dev/nats.conf", "components/two-cluster/nats.conf", "../compose/nats.conf"])
def test_the_bus_takes_its_configuration(conf: str, tmp_path: Path) -> None:
    """With the users that `towline access nats` makes."""
    binaries = Path(sys.executable).parent
    subprocess.run(
        [binaries / "towline", "access", "nats", "--run", "demo", "--out", tmp_path / "access"], check=True, capture_output=True
    )
    text = (FOLDER / conf).read_text().replace('"/data"', f'"{tmp_path / "data"}"')
    text = text.replace(', tls: { ca_file: "/etc/nats/leaf/ca.pem" }', "")
    (tmp_path / "nats.conf").write_text(text)
    seed = (tmp_path / "access/rollout-worker.nk").read_text().strip()
    done = subprocess.run(
        [binaries / "nats-server", "-t", "-c", tmp_path / "nats.conf"],
        env={"POD_NAME": "leaf-0", "HOME_LEAF_URL": "tls://home:7422", "LEAF_SEED": seed},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_scraped_jobs_have_the_names_that_the_alerts_ask_for() -> None:
    (monitor,) = of_kind(folder("prod"), "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    targets = {rule["targetLabel"]: rule.get("replacement", "$1") for rule in endpoint["relabelings"]}
    assert set(targets) == {"job", "run"}
    alerts = (FOLDER.parent / "observe/prometheus/alerts.yml").read_text()
    (asked,) = set(re.findall(r'job=~"([^"]+)"', alerts))
    for name, deployment in of_kind(folder("prod"), "Deployment").items():
        assert re.fullmatch(asked, targets["job"].replace("$1", name))
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}


def test_the_alerts_are_observes() -> None:
    written = yaml.safe_load((FOLDER.parent / "observe/prometheus/alerts.yml").read_text())
    for overlay in ("prod", "home", "site-b"):
        assert of_kind(folder(overlay), "PrometheusRule")["towline-alerts"]["spec"] == written
