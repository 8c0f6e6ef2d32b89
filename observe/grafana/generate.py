"""The dashboard: `python observe/grafana/generate.py` writes dashboard.json beside this file. Metrics: docs/metrics.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # a script, not a package
from panels import RUN, WINDOW, Panel, any_rate, both, now, rate

TARGET = Path(__file__).with_name("dashboard.json")
WIDTH, HEIGHT, A_ROW = 8, 7, 3
"""Of a panel in Grafana's grid of 24 columns, and how many stand side by side."""


ROWS: list[tuple[str, list[Panel]]] = [
    (
        "Run",
        [
            Panel(
                "Depth",
                [(now("towline_buffer_depth"), "{{run}}"), (now("towline_buffer_target_depth"), "{{run}} wanted")],
                text="Batches trained along the line.",
            ),
            Panel(
                "Reward",
                [
                    (now("towline_buffer_evaluation_reward"), "{{run}} held-out"),
                    (now("towline_trainer_reward_mean"), "{{run}} train"),
                ],
            ),
            Panel(
                "Services ready",
                [('sum by (run, __name__) ({__name__=~"towline_.+_ready", ' + RUN + "})", "{{__name__}}")],
                text="Replicas of each service that are ready; a standby isn't.",
            ),
        ],
    ),
    (
        "Samples",
        [
            Panel(
                "Samples per second",
                [
                    (rate("towline_buffer_samples_admitted_total"), "admitted"),
                    (rate("towline_reward_samples_scored_total"), "scored"),
                    (rate("towline_buffer_samples_trained_total"), "trained"),
                    (rate("towline_buffer_samples_dropped_total", "reason"), "dropped: {{reason}}"),
                ],
                "ops",
            ),
            Panel(
                "Groups under way",
                [
                    (now("towline_buffer_groups_open"), "open"),
                    (now("towline_buffer_groups_complete"), "complete"),
                    (now("towline_buffer_pacing_band_groups"), "pacing allows"),
                    (now("towline_buffer_external_groups_offered"), "offered from outside"),
                ],
            ),
            Panel(
                "Staleness of trained samples",
                [(now("towline_buffer_trained_sample_staleness_depths_bucket", "le"), "{{le}}")],
                "short",
                "How many of the standing batches' samples are at most so many depths old.",
                "bargauge",
                {"options": {"orientation": "horizontal", "displayMode": "gradient"}},
            ),
            Panel(
                "Staleness",
                [
                    (now("towline_buffer_staleness_depths", "statistic"), "{{statistic}}"),
                    (now("towline_buffer_staleness_token_mean_depths"), "mean of tokens"),
                ],
                "short",
                "In depths.",
            ),
            Panel(
                "Waits",
                [
                    (now("towline_buffer_oldest_open_group_age_seconds"), "oldest open group"),
                    (now("towline_buffer_oldest_complete_group_age_seconds"), "oldest complete group"),
                    (now("towline_buffer_oldest_batch_age_seconds"), "oldest batch"),
                ],
                "s",
            ),
            Panel(
                "Who waits for whom",
                [
                    (now("towline_buffer_trainer_waiting_ratio"), "trainer for batches"),
                    (now("towline_buffer_admission_blocked_ratio"), "rollouts for the trainer"),
                ],
                "percentunit",
            ),
        ],
    ),
    (
        "Queues",
        [
            Panel(
                "Streams, share of their room",
                [
                    (
                        " / ".join(now(f"towline_buffer_stream_{what}_bytes", "stream") for what in ("size", "limit")),
                        "{{stream}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Consumers",
                [
                    (now("towline_buffer_consumer_pending", "consumer"), "{{consumer}} waiting"),
                    (now("towline_buffer_consumer_ack_pending", "consumer"), "{{consumer}} in hand"),
                    (now("towline_buffer_consumer_redelivered", "consumer"), "{{consumer}} again"),
                ],
            ),
            Panel(
                "Dead letters",
                [
                    (now("towline_buffer_stream_messages", more='stream="DEAD"'), "in DEAD"),
                    (
                        'sum by (run, stage) (increase({__name__=~"towline_.+_dead_letters_total", ' + RUN + "}[1h]))",
                        "{{stage}}, last hour",
                    ),
                ],
            ),
        ],
    ),
    (
        "Rollouts",
        [
            Panel("Trajectories per second", [(rate("towline_rollout_worker_trajectories_total"), "{{run}}")], "ops"),
            Panel(
                "Tokens per second",
                [
                    (rate("towline_rollout_worker_generation_tokens_total"), "trajectories"),
                    (rate("towline_rollout_worker_request_tokens_total"), "requests"),
                ],
                "ops",
            ),
            Panel(
                "Slots",
                [
                    (now("towline_rollout_worker_num_samples_running", how="sum"), "in use"),
                    (now("towline_rollout_worker_slots", how="sum"), "there are"),
                    (now("towline_rollout_worker_num_requests_waiting", how="sum"), "requests waiting"),
                ],
            ),
            Panel(
                "Replicas by version",
                [(f'count_values by (run) ("version", towline_rollout_worker_version{{{RUN}}})', "{{version}}")],
                "short",
            ),
            Panel(
                "Behind the newest version",
                [
                    (now("towline_rollout_worker_version_lag_seconds"), "slowest replica"),
                    (now("towline_rollout_worker_version_lag_seconds", how="avg"), "mean"),
                ],
                "s",
            ),
            Panel(
                "Version convergence",
                both("towline_rollout_worker_version_convergence_seconds"),
                "s",
                "From a LOG entry to a replica that serves it.",
            ),
            Panel("Activation pause", both("towline_rollout_worker_activation_pause_seconds", "mode"), "s"),
            Panel("Preparing a version", both("towline_rollout_worker_version_prepare_seconds"), "s"),
            Panel(
                "Failed attempts",
                [
                    (rate("towline_rollout_worker_attempts_failed_total", "stage"), "{{stage}}"),
                    (rate("towline_rollout_worker_trajectories_superseded_total"), "superseded"),
                    (now("towline_rollout_worker_versions_failed", how="sum"), "versions that failed"),
                ],
            ),
        ],
    ),
    (
        "Reward",
        [
            Panel("Verifier", both("towline_reward_verifier_duration_seconds"), "s"),
            Panel(
                "Failures",
                [
                    (rate("towline_reward_samples_failed_total"), "given up"),
                    (rate("towline_reward_verifier_retries_total"), "retried"),
                ],
                "ops",
            ),
            Panel(
                "In hand",
                [
                    (now("towline_reward_deliveries_in_progress", how="sum"), "deliveries"),
                    (now("towline_reward_verifier_calls_stuck", how="sum"), "stuck calls"),
                ],
            ),
        ],
    ),
    (
        "Training",
        [
            Panel("Loss", [(now("towline_trainer_loss"), "{{run}}")]),
            Panel("Gradient norm", [(now("towline_trainer_gradient_norm"), "{{run}}")]),
            Panel(
                "Engine and trainer",
                [(now("towline_trainer_mismatch_kl"), "KL"), (now("towline_trainer_logprob_abs_diff"), "|logprob difference|")],
            ),
            Panel(
                "Where the time goes",
                [
                    (rate("towline_trainer_train_seconds_total"), "training"),
                    (rate("towline_trainer_idle_seconds_total"), "waiting"),
                    (rate("towline_trainer_snapshot_seconds_total"), "copying"),
                    (rate("towline_trainer_encode_seconds_total"), "encoding (beside)"),
                    (rate("towline_trainer_upload_seconds_total"), "uploading (beside)"),
                ],
                "percentunit",
            ),
            Panel(
                "Skipped and missing",
                [
                    (rate("towline_trainer_skips_total", "reason"), "{{reason}}"),
                    (rate("towline_trainer_rows_missing_total"), "missing rows"),
                ],
                "ops",
            ),
            Panel("Tokens per second", [(rate("towline_trainer_tokens_total"), "{{run}}")], "ops"),
        ],
    ),
    (
        "Versions",
        [
            Panel(
                "Committed",
                [
                    (now("towline_publisher_head_version"), "head"),
                    (rate("towline_publisher_versions_refused_total", "code"), "refused: {{code}}"),
                ],
            ),
            Panel(
                "Bytes per version",
                [
                    (f"{rate('towline_trainer_weights_sent_bytes_total')} / {rate('towline_trainer_versions_total')}", "sent"),
                    (now("towline_trainer_model_size_bytes"), "the model"),
                ],
                "bytes",
                extra={"fieldConfig": {"defaults": {"custom": {"scaleDistribution": {"type": "log", "log": 10}}}}},
            ),
            Panel(
                "Verify and commit",
                [
                    (rate("towline_publisher_verify_seconds_total"), "verifying"),
                    (rate("towline_publisher_commit_seconds_total"), "committing"),
                ],
                "percentunit",
            ),
        ],
    ),
    (
        "Gateway",
        [
            Panel("Answers", [(rate("towline_gateway_requests_total", "status"), "{{status}}")], "reqps"),
            Panel("Time to first token", both("towline_gateway_time_to_first_token_seconds", "route"), "s"),
            Panel("Whole request", both("towline_gateway_e2e_request_latency_seconds", "route"), "s"),
            Panel(
                "At work",
                [
                    (now("towline_gateway_num_requests_running", how="sum"), "running"),
                    (rate("towline_gateway_requests_continued_total"), "went on elsewhere, per second"),
                ],
            ),
            Panel("Tokens per second", [(rate("towline_gateway_generation_tokens_total", "route"), "{{route}}")], "ops"),
            Panel("Replicas refuse", [(rate("towline_rollout_worker_requests_refused_total", "code"), "{{code}}")], "ops"),
        ],
    ),
    (
        "Infrastructure",
        [
            Panel(
                "Object store, p99",
                [
                    (
                        f"histogram_quantile(0.99, {any_rate('store_request_duration_seconds_bucket', 'operation, le')})",
                        "{{operation}}",
                    )
                ],
                "s",
            ),
            Panel(
                "Object store, failures", [(any_rate("store_errors_total", "operation, code"), "{{operation}} {{code}}")], "ops"
            ),
            Panel(
                "Bus lost",
                [
                    (
                        'sum by (run, __name__) (increase({__name__=~"towline_.+_bus_disconnects_total", ' + RUN + "}[15m]))",
                        "{{__name__}}",
                    )
                ],
            ),
            Panel("Memory", [(f"process_resident_memory_bytes{{{RUN}}}", "{{job}} {{instance}}")], "bytes"),
            Panel("CPU", [(f"rate(process_cpu_seconds_total{{{RUN}}}[{WINDOW}])", "{{job}} {{instance}}")], "percentunit"),
            Panel("Spans", [(any_rate("spans_exported_total"), "exported"), (any_rate("spans_failed_total"), "lost")], "ops"),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "id": len(panels) + 1,
                       "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})  # fmt: skip
        top += 1
        for place, panel in enumerate(row):
            at = {"x": WIDTH * (place % A_ROW), "y": top + HEIGHT * (place // A_ROW), "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, at))
        top += HEIGHT * -(-len(row) // A_ROW)
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "uid": "towline", "title": "Towline", "tags": ["towline"], "schemaVersion": 39, "editable": True, "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"}, "timezone": "browser", "graphTooltip": 1, "panels": panels,
        "links": [{"title": "Metrics and alerts", "type": "link", "url": "docs/metrics.md", "targetBlank": True}],
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
            {"name": "run", "label": "Run", "type": "query", "datasource": source, "refresh": 2, "includeAll": True,
             "allValue": ".*", "multi": True, "query": {"query": "label_values(towline_buffer_depth, run)", "refId": "run"},
             "current": {"text": "All", "value": "$__all"}},
        ]},
    }  # fmt: skip


def _panel(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    made: dict[str, Any] = {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.text, "gridPos": at, "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0 if panel.unit != "short" else None}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": query, "legendFormat": legend,
             "instant": panel.kind == "bargauge", "range": panel.kind != "bargauge"}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip
    for key, value in panel.extra.items():
        made[key] = _merged(made.get(key, {}), value)
    return made


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return old | {key: _merged(old.get(key, {}), value) if isinstance(value, dict) else value for key, value in new.items()}


def rendered() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(rendered())
    sys.stdout.write(f"{TARGET.name}: {sum(len(row) for _, row in ROWS)} panels\n")
