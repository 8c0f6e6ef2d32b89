"""What watches a run: metrics, their page, the alert rules and the dashboard name the same things, and those are exported."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support.exported import PAGE, SERVICES, families, full_name, made, names, page
from towline.runtime.metrics_catalogue import CATALOGUE, LEFT_OUT
from towline.runtime.service import Service

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "observe" / "prometheus" / "alerts.yml"
ANCHORS = ROOT / "observe" / "prometheus" / "runbook-anchors.txt"
TARGET_LABELS = {"run", "job", "instance"}
"""Of every series, given by whoever scrapes."""
OF_PROMETHEUS = {"up": set[str](), "process_resident_memory_bytes": set[str](), "process_cpu_seconds_total": set[str]()}
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    return names() | OF_PROMETHEUS


def faults(expression: str, exported: dict[str, set[str]]) -> list[str]:
    """What the expression names that nobody exports."""
    found: list[str] = []
    selected: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            series = {node.name} if node.name else set()
            labels = {matcher.name for matcher in node.matchers.matchers}
            for matcher in node.matchers.matchers:
                if matcher.name == "__name__":
                    series |= {name for name in exported if re.fullmatch(matcher.value, name)}
            if not series:
                found.append(f"nothing is named so: {node.prettify()}")
            for name in series:
                if name not in exported:
                    found.append(f"nobody exports {name}")
                else:
                    unknown = labels - exported[name] - TARGET_LABELS - {"__name__"}
                    found.extend(f"{name} has no label {label}" for label in unknown)
            selected.update(*(exported.get(name, ()) for name in series))
        return True

    def grouped(node: Any) -> bool:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            known = selected | TARGET_LABELS | {"__name__"}
            found.extend(f"no series here has the label {label}" for label in node.modifier.labels if label not in known)
        return True

    parsed = promql_parser.parse(expression)
    promql_parser.walk(parsed, visit, grouped)
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported_and_says_what_to_do(rule: dict[str, Any], exported: dict[str, set[str]]) -> None:
    assert faults(rule["expr"], exported) == []
    assert re.fullmatch(r"Towline([A-Z][a-z]+)+", rule["alert"])
    assert rule["labels"]["severity"] in ("page", "ticket", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    grouped = {label for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in by.split(", ")}
    # An alert has no `__name__`: those of two metrics would be one.
    made = set(re.findall(r'"(\w+)", "\$1", "__name__"', rule["expr"]))
    assert labels - {"job", "instance"} <= (grouped - {"__name__"}) | made


def test_a_wrong_name_or_label_is_found(exported: dict[str, set[str]]) -> None:
    assert faults("rate(towline_buffer_depths[5m])", exported) == ["nobody exports towline_buffer_depths"]
    assert faults('towline_buffer_depth{reason="x"}', exported) == ["towline_buffer_depth has no label reason"]
    assert faults("sum by (reasn) (towline_buffer_samples_dropped_total)", exported) == ["no series here has the label reasn"]
    assert faults('{__name__=~"towline_.+_redy"}', exported)
    with pytest.raises(ValueError, match="parenthesis"):
        faults("sum by (run (towline_buffer_depth)", exported)


def test_the_list_of_runbook_anchors_is_that_of_the_alerts_and_operations_has_each() -> None:
    anchors = [rule["alert"].lower() for rule in RULES]
    assert len(set(anchors)) == len(anchors)
    assert ANCHORS.read_text().splitlines() == anchors
    operations = ROOT / "docs" / "operations.md"
    if operations.exists():
        headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in
                    operations.read_text().splitlines() if line.startswith("#")}  # fmt: skip
        assert set(anchors) - headings == set()


def test_promtool_takes_the_rules_where_it_is_installed() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool isn't installed (Debian: apt-get install prometheus)")
    for command in (["check", "rules", str(ALERTS)], ["test", "rules", str(ALERTS.with_name("alerts-test.yml"))]):
        done = subprocess.run([tool, *command], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _dashboard() -> Any:
    path = ROOT / "observe" / "grafana" / "generate.py"
    spec = importlib.util.spec_from_file_location("observe_dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_as_generated_and_asks_for_what_is_exported(exported: dict[str, set[str]]) -> None:
    module = _dashboard()
    assert module.TARGET.read_text() == module.rendered(), "run: python observe/grafana/generate.py"
    panels = json.loads(module.TARGET.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        for target in panel.get("targets", []):
            plain = target["expr"].replace("$__rate_interval", "5m").replace("$run", ".*")
            assert faults(plain, exported) == [], panel["title"]


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.name)
def test_every_figure_is_a_metric_or_left_out_by_name(cls: type[Service]) -> None:
    with made(cls) as service:
        figures = dict(service.figures())
    shown = {one.figure.partition(".")[0] for one in CATALOGUE[cls.name]}
    left_out = {name.partition(".")[0] for name in LEFT_OUT.get(cls.name, ())}
    assert set(figures) - shown - left_out == set(), "name them in runtime/metrics_catalogue.py"
    assert shown - set(figures) == set(), "nobody says these any more"


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.name)
def test_metrics_are_named_as_prometheus_asks(cls: type[Service]) -> None:
    with made(cls) as service:
        for family in families(service):
            name = family.name.removeprefix(f"towline_{cls.name}_")
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name), name
            assert not re.search(r"(^|_)(ms|millis|milliseconds|minutes|hours|kb|mb|megabytes|percent|share)(_|$)", name), name
            assert not name.endswith(("_total", "_bucket", "_count")), name
            assert family.documentation, name
            if "seconds" in name or "bytes" in name:
                assert re.search(r"_(seconds|bytes)(_mean)?$", name), name
        read = {family.name for family in text_string_to_metric_families(service.metrics.render().decode())}
        assert read == {family.name for family in service.metrics.registry.collect()}


def test_the_page_of_metrics_is_what_the_services_export() -> None:
    assert PAGE.read_text() == page(), "run: PYTHONPATH=tests .venv/bin/python -m support.exported > docs/metrics.md"


def test_names_are_unique_among_the_services() -> None:
    seen: set[str] = set()
    for cls in SERVICES:
        with made(cls) as service:
            mine = {full_name(family) for family in families(service)}
        assert not mine & seen
        seen |= mine


def test_files_that_are_mounted_are_yaml_and_the_collector_samples_nothing() -> None:
    for path in (ROOT / "observe").rglob("*.y*ml"):
        assert yaml.safe_load(path.read_text()), path
    collector = yaml.safe_load((ROOT / "observe/otel/collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= set(collector[part])
        assert not any("sampl" in name for name in pipeline["processors"])
