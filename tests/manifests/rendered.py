"""The Kubernetes manifests as `kubectl kustomize` renders them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (FOLDER / "overlays").iterdir() if path.is_dir()))
Resource = dict[str, Any]


@cache
def rendered(folder: str) -> tuple[Resource, ...]:
    """Of k8s/`folder`; skipped where there is no kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here")
    done = subprocess.run([kubectl, "kustomize", FOLDER / folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(folder: str, *kinds: str) -> dict[str, Resource]:
    return {found["metadata"]["name"]: found for found in rendered(folder) if found["kind"] in kinds}


def pod_specs(folder: str) -> Iterator[tuple[str, Resource]]:
    """Every pod's spec, by the name of what makes the pod."""
    for found in rendered(folder):
        spec = found.get("spec", {})
        if found["kind"] == "CronJob":
            spec = spec["jobTemplate"]["spec"]
        if found["kind"] in ("Deployment", "StatefulSet", "Job", "CronJob"):
            yield found["metadata"]["name"], spec["template"]["spec"]


def config_map(folder: str, name: str) -> dict[str, str]:
    """The data of the generated map, whose name has a hash after it."""
    found = [one for full, one in of_kind(folder, "ConfigMap").items() if full.rpartition("-")[0] == name]
    assert len(found) == 1, name
    data: dict[str, str] = found[0]["data"]
    return data
