"""A whole `towline up` with tracing on: every process exports, and a trained sample leads to the version that it made, served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.otlp import Collector, SpanSeen, collecting

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"
SMALL = (
    "--set", "eval.prompts=8", "--set", "eval.every=2", "--set", "buffer.groups_per_batch=4",
    "--set", "trainer.checkpoint_every=1",
    "--set", "model.arguments={layers = 1, hidden = 32, warm_up_steps = 5}", "--set", "rollout.poll_seconds=0.1",
)  # fmt: skip


@pytest.mark.slow
def test_every_trained_sample_leads_through_all_services_to_a_version_that_replicas_serve(tmp_path: Path) -> None:
    with collecting() as collector:
        command = [
            sys.executable, "-m", "towline.cli.main", "up", str(DEMO), "--run", "traced", "--steps", "3", "--store",
            (tmp_path / "store").as_uri(), *SMALL, "--set", f"telemetry.endpoint={collector.url}", "--set",
            "telemetry.sample_ratio=0.5",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ids = collector.by_id()
    assert len(ids) == len(collector.spans)
    assert [span for span in collector.spans if span.parent_id and (span.trace_id, span.parent_id) not in ids] == []
    assert [link for span in collector.spans for link in span.links if link not in ids] == []
    trained = collector.named("buffer")
    assert trained
    for waited in trained:
        steps = _below(collector, ids[waited.links[0]], "train.step")
        assert len(steps) == 1
        stage = _linking(collector, "version.stage", steps[0])
        commit = _below(collector, stage, "version.commit")
        assert commit[0].attributes["towline.version"] == stage.attributes["towline.version"]
        assert all(span.parent_id == commit[0].span_id for span in _below(collector, stage, "version.activate"))
    last = max(collector.named("version.activate"), key=lambda span: span.end)
    assert {span.name for span in collector.spans if span.trace_id == last.trace_id} >= {
        "version.stage", "version.upload", "version.publish", "version.verify", "version.commit", "version.prepare",
        "version.activate", "engine.activate", "version.prove",
    }  # fmt: skip
    assert {span.service for span in collector.spans} == {
        "towline-buffer", "towline-rollout_worker", "towline-reward", "towline-trainer", "towline-publisher"
    }  # fmt: skip


def _below(collector: Collector, root: SpanSeen, name: str) -> list[SpanSeen]:
    return [span for span in collector.named(name) if span.trace_id == root.trace_id]


def _linking(collector: Collector, name: str, target: SpanSeen) -> SpanSeen:
    found = [span for span in collector.named(name) if (target.trace_id, target.span_id) in span.links]
    assert len(found) == 1
    return found[0]
