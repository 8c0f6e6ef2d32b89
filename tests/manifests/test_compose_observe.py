"""Profile `observe`: each server is given files that name each other rightly, and finds the next one where it listens."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from typing import Any

import yaml

from manifests.compose_file import FOLDER, services

SERVICES = services()
README = (FOLDER / "README.md").read_text()


def inside(service: str) -> dict[str, str]:
    """Where in the container each file of the repository is mounted: its place there -> its place here."""
    mounts = [volume.split(":") for volume in SERVICES[service]["volumes"] if volume.startswith(".")]
    return {mount[1]: mount[0] for mount in mounts}


def read(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def test_prometheus_finds_its_configuration_and_the_alerts_where_they_are_mounted() -> None:
    mounted = inside("prometheus")
    [named] = [word.split("=")[1] for word in SERVICES["prometheus"]["command"] if word.startswith("--config.file=")]
    [pattern] = read(mounted[named])["rule_files"]
    found = {path for path in mounted if fnmatch(path, pattern)}
    assert [mounted[path] for path in found] == ["../observe/prometheus/alerts.yml"]
    [kept] = [word.split("=")[1] for word in SERVICES["prometheus"]["command"] if word.startswith("--storage.tsdb.path=")]
    assert f"prometheus-data:{kept}" in SERVICES["prometheus"]["volumes"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    grafana, mounted = SERVICES["grafana"], inside("grafana")
    provisioning = mounted["/etc/grafana/provisioning"]
    [source] = read(f"{provisioning}/datasources/prometheus.yaml")["datasources"]
    variable = re.fullmatch(r"\$\{(\w+)\}", source["url"])
    assert variable is not None
    assert grafana["environment"][variable[1]] == "http://prometheus:9090", "its own port, whatever is published"
    assert (source["type"], source["isDefault"]) == ("prometheus", True), "the dashboard takes the default one of that type"
    [provider] = read(f"{provisioning}/dashboards/towline.yaml")["providers"]
    [dashboard] = [here for there, here in mounted.items() if there.startswith(f"{provider['options']['path']}/")]
    assert json.loads((FOLDER / dashboard).read_text())["panels"]
    for name, value in grafana["environment"].items():
        assert not name.endswith("__FILE") or value.startswith("/access/"), "a secret lies in the volume of keys"
    assert grafana["depends_on"] == {"prometheus": {"condition": "service_healthy"}}


def test_traces_find_their_way_to_jaeger() -> None:
    collector, mounted = SERVICES["otel-collector"], inside("otel-collector")
    [named] = [word.split("=")[1] for word in collector["command"] if word.startswith("--config=")]
    assert f"--config={named}" in collector["healthcheck"]["test"]
    text = (FOLDER / mounted[named]).read_text()
    for variable, default in re.findall(r"\$\{env:(\w+)(:-[^}]*)?\}", text):
        assert default or variable in collector["environment"], variable
    configuration = yaml.safe_load(text)
    for pipeline in configuration["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(configuration[kind]), "a component that isn't defined"
        assert pipeline["processors"][0] == "memory_limiter", "before whatever holds memory"
    listens = collector["environment"]["OTLP_LISTEN"]
    assert listens.startswith("0.0.0.0:")
    endpoint = re.search(r"TOWLINE_TELEMETRY_ENDPOINT=(\S+)", README)
    assert endpoint is not None
    assert endpoint[1] == f"http://otel-collector:{listens.split(':')[1]}"
    takes = SERVICES["jaeger"]["environment"]["COLLECTOR_OTLP_HTTP_HOST_PORT"]
    assert collector["environment"]["TRACES_ENDPOINT"] == f"http://jaeger:{takes.split(':')[1]}"
