"""A finished run on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from towline.local.run_directory import RunDirectory
from towline.local.up import Finished
from towline.report.progress import number, size

MOST_VIOLATIONS = 10


def print_outcome(console: Console, finished: Finished, directory: RunDirectory) -> None:
    """Summary and audit."""
    summary, audit = finished.summary, finished.audit
    samples, staleness, delta, phases = summary.samples, summary.staleness, summary.delta, summary.phase_seconds
    dropped = ", ".join(f"{count} {reason}" for reason, count in samples["dropped"].items()) or "none"
    rows = []
    for name, value in (
        (
            "reward, held-out" if summary.held_out else "reward, train",
            f"{number(summary.reward_first)} -> {number(summary.reward_last)}",
        ),
        ("steps", f"{summary.steps} in {summary.wall_seconds:.0f} s, {summary.versions_committed} policy versions"),
        (
            "samples",
            f"{samples['admitted']} admitted = {samples['trained']} trained + {samples['evaluated']} evaluated "
            f"+ {sum(samples['dropped'].values())} dropped + {samples['open']} open (dropped: {dropped})",
        ),
        ("staleness", f"{staleness.mean:.2f} mean, {staleness.p99:.0f} p99, {staleness.max} max"),
        ("rollout", f"{summary.trajectories_per_s:.0f} trajectories/s, {summary.tokens_per_s:.0f} tokens/s"),
        (
            "delta",
            f"{size(delta.wire_bytes_mean)} a version, {delta.density_mean:.0%} of the weights changed, "
            f"{delta.ratio_mean:.1f}x smaller than the model",
        ),
        (
            "a version's way",
            f"encode {_ms(phases.encode)}, upload {_ms(phases.upload)}, commit {_ms(phases.commit)}, "
            f"prepare {_ms(phases.prepare)}, pause {_ms(phases.pause)}",
        ),
        ("trainer idle", f"{summary.trainer_idle_share:.0%}"),
        ("audit", "clean" if audit.clean else f"{len(audit.violations)} violations"),
        ("summary", str(directory.summary_path)),
        ("report", str(directory.report_path) if directory.report_path.is_file() else "none"),
    ):
        rows.append((name, value))
    console.print(Text(f"run {summary.run} is finished", style="bold"))
    for name, value in rows:  # lines, not a table, which wraps at 80 columns where the output isn't a terminal
        console.print(Text.assemble((f"{name:18}", "dim"), value), soft_wrap=True)
    for violation in audit.violations[:MOST_VIOLATIONS]:
        console.print(Text(f"VIOLATED {violation}", style="red"))


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
