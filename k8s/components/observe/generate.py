"""observe/'s alerts as the Prometheus operator takes them: `python k8s/components/observe/generate.py` writes alerts.yaml."""

from __future__ import annotations

import textwrap
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "observe/prometheus/alerts.yml"
TARGET = Path(__file__).with_name("alerts.yaml")
HEAD = """\
# Written by generate.py beside it from observe/prometheus/alerts.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: towline-alerts
spec:
"""


def generated() -> str:
    return HEAD + textwrap.indent(SOURCE.read_text(), "  ")


if __name__ == "__main__":
    TARGET.write_text(generated())
