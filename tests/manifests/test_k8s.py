"""What the Kubernetes manifests promise, rendered offline: valid, pinned, without rights, probed, with the code's names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from manifests.rendered import FOLDER, OVERLAYS, config_map, of_kind, pod_specs, rendered
from towline.access import roles
from towline.config import Settings, load_settings
from towline.local.services import MODULES

CLUSTER = "1.31"
SERVICES = {name.replace("_", "-") for name in MODULES}
HOME = ("dev", "prod")
SETTLE_SECONDS = 10.0
"""As in test_compose.py."""
CUSTOM = {"ScaledObject", "PodMonitor", "PrometheusRule"}


def folder(overlay: str) -> str:
    return f"overlays/{overlay}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_resource_is_valid(overlay: str) -> None:
    checked = 0
    for resource in rendered(folder(overlay)):
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, CLUSTER, strict=True)
            checked += 1
        assert resource["metadata"].get("namespace"), resource["metadata"]["name"]
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
        assert secrets - {"towline-leaf"} == {f"towline-{name}"}
        for volume in spec["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440, name
        for container in spec["containers"]:
            assert not [one for one in container.get("env", []) if "KEY" in one["name"] and "value" in one], name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_whatever_stays_up_is_probed_and_has_its_share_of_the_machine(overlay: str) -> None:
    for name, workload in of_kind(folder(overlay), "Deployment", "StatefulSet").items():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert len({"exec", "httpGet", "grpc"} & set(container[probe])) == 1, f"{name}: {probe}"
            if "grpc" in container[probe]:
                assert container[probe]["grpc"]["port"] in {port["containerPort"] for port in container["ports"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
        assert "memory" in container["resources"]["limits"], name


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


@pytest.mark.parametrize("overlay", HOME)
def test_a_disruption_leaves_most_of_what_scales(overlay: str) -> None:
    budgets = of_kind(folder(overlay), "PodDisruptionBudget")
    assert set(budgets) == SERVICES
    for name, budget in budgets.items():
        wanted = budget["spec"]["selector"]["matchLabels"].items()
        labels = of_kind(folder(overlay), "Deployment")[name]["spec"]["template"]["metadata"]["labels"].items()
        assert wanted <= labels, name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_environment_name_is_a_setting_and_the_runs_file_is_one(overlay: str, monkeypatch: Any, tmp_path: Path) -> None:
    shared = config_map(folder(overlay), "towline-environment")
    for name, spec in pod_specs(folder(overlay)):
        own = {one["name"]: one["value"] for one in spec["containers"][0].get("env", []) if "value" in one}
        for variable in shared | own:
            if variable.startswith("TOWLINE_"):
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


def test_the_fleet_grows_with_the_slots_that_the_buffer_wants() -> None:
    (scaled,) = of_kind(folder("prod"), "ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"]["name"] == "rollout-worker"
    assert scaled["spec"]["scaleTargetRef"]["name"] in of_kind(folder("prod"), "Deployment")
    (trigger,) = scaled["spec"]["triggers"]
    (rules,) = of_kind(folder("prod"), "PrometheusRule").values()
    records = {rule["record"]: rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]}
    (name,) = records
    assert f'{name}{{namespace="{scaled["metadata"]["namespace"]}"}}' in trigger["metadata"]["query"]
    toml = (FOLDER / "overlays/prod/run.toml").read_text()
    slots = re.search(r"^slots = (\d+)", toml, re.MULTILINE)
    assert slots is not None
    assert trigger["metadata"]["threshold"] == slots[1], "of one worker"


def test_the_scaling_rule_asks_for_metrics_that_the_buffer_has() -> None:
    from towline.runtime.metrics_catalogue import BUFFER

    (rules,) = of_kind(folder("prod"), "PrometheusRule").values()
    asked = set(re.findall(r"towline_buffer_(\w+)", str(rules["spec"])))
    assert asked
    assert asked <= {shown.metric for shown in BUFFER}


def test_the_network_is_closed_but_for_what_is_named() -> None:
    for overlay in HOME:
        policies = of_kind(folder(overlay), "NetworkPolicy")
        closed = policies["deny-by-default"]["spec"]
        assert closed["podSelector"] == {}
        assert set(closed["policyTypes"]) == {"Ingress", "Egress"}
        assert not [port for rule in policies["bus-and-store"]["spec"]["egress"] if "ports" not in rule for port in [rule]]


def test_a_second_cluster_has_workers_and_reward_alone() -> None:
    assert set(of_kind(folder("site-b"), "Deployment")) == {"rollout-worker", "reward", "nats"}
    assert not of_kind(folder("site-b"), "Job", "CronJob", "StatefulSet")


@pytest.mark.parametrize("conf", ["overlays/dev/nats.conf", "components/two-cluster/nats.conf", "../compose/nats.conf"])
def test_the_bus_takes_its_configuration(conf: str, tmp_path: Path) -> None:
    """With the users that `towline access nats` makes."""
    binaries = Path(sys.executable).parent
    subprocess.run(
        [binaries / "towline", "access", "nats", "--run", "demo", "--out", tmp_path / "access"], check=True, capture_output=True
    )
    text = (FOLDER / conf).read_text().replace('"/data"', f'"{tmp_path / "data"}"')
    (tmp_path / "nats.conf").write_text(text.replace(', tls: { ca_file: "/etc/nats/leaf/ca.pem" }', ""))
    seed = (tmp_path / "access/rollout-worker.nk").read_text().strip()
    done = subprocess.run(
        [binaries / "nats-server", "-t", "-c", tmp_path / "nats.conf"],
        env={"POD_NAME": "leaf-0", "HOME_LEAF_URL": "tls://home:7422", "LEAF_SEED": seed},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_readme_makes_every_secret_that_a_pod_mounts_of_files_that_there_are(tmp_path: Path) -> None:
    readme = (FOLDER / "README.md").read_text()
    commands = re.findall(r"towline (access \w+ [^&\n]+)", readme)
    assert len(commands) == 2
    for command in commands:
        arguments = command.replace("--out keys", f"--out {tmp_path}").split()
        subprocess.run([Path(sys.executable).with_name("towline"), *arguments], check=True, capture_output=True, timeout=60)
    (looped,) = re.findall(r"for role in ([\w\s-]+);", readme)
    made = {f"towline-{role}" for role in looped.split()} | set(re.findall(r"generic (towline-\w+) --from", readme))
    files = {
        name.replace("$role", role) for role in looped.split() for name in re.findall(r"--from-file=keys/([$\w.-]+)", readme)
    }
    drawn = {"service.token", "tenant.token"}
    assert {name for name in files - drawn if not (tmp_path / name).is_file()} == set()
    mounted = {
        volume["secret"]["secretName"] for _, spec in pod_specs(folder("dev")) for volume in spec["volumes"] if "secret" in volume
    }
    assert mounted <= made
    shared = config_map(folder("dev"), "towline-environment")
    assert f"--prefix {shared['TOWLINE_STORE__URL'].rpartition('/')[2]}" in readme


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
