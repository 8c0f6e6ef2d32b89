"""A run's progress, in one typed value: what the live view draws, what the plain lines and `towline status` say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from towline.report.figures import FigureBook


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands. Rewards are means; None where there is none yet."""

    depth: int
    steps: int
    version: int | None
    reward_train: float | None
    reward_held_out: float | None
    held_out_depth: int | None
    staleness_mean: float
    staleness_max: float
    max_staleness: int
    trajectories_per_s: float
    tokens_per_s: float
    delta_bytes: float | None
    """Mean wire bytes of a version so far."""
    delta_density: float | None
    open_samples: int
    restarts: int
    finished: bool
    end_reason: str | None
    dropped: int = 0
    """Samples, for whatever reason."""
    problem: str = ""
    """The reward service's newest error, while it has failed to score a sample."""


def progress_of(book: FigureBook, *, steps: int, max_staleness: int) -> Progress:
    buffer, trainer, publisher = book.one("buffer"), book.one("trainer"), book.one("publisher")
    evals = buffer.get("evals") or []
    held_out = next(((depth, mean) for _, depth, mean in reversed(evals) if mean is not None), None)
    staleness: dict[str, Any] = buffer.get("staleness") or {}
    versions = book.total("trainer", "versions")
    serving = [status.figures.get("version") for status in book.latest("rollout_worker")]
    known = [version for version in (publisher.get("head"), *serving) if version is not None]
    return Progress(
        depth=int(buffer.get("depth") or 0),
        steps=steps,
        version=max(known, default=None),
        reward_train=trainer.get("reward_mean") if trainer.get("batches") else None,
        reward_held_out=None if held_out is None else held_out[1],
        held_out_depth=None if held_out is None else int(held_out[0]),
        staleness_mean=float(staleness.get("mean") or 0.0),
        staleness_max=float(staleness.get("max") or 0.0),
        max_staleness=max_staleness,
        trajectories_per_s=book.rate("trajectories"),
        tokens_per_s=book.rate("tokens"),
        delta_bytes=book.total("trainer", "wire_bytes") / versions if versions else None,
        delta_density=trainer.get("density") if versions else None,
        open_samples=int(buffer.get("open") or 0),
        restarts=book.restarts,
        finished=bool(buffer.get("finished")),
        end_reason=buffer.get("end_reason"),
        dropped=sum((buffer.get("dropped") or {}).values()),
        problem=_problem(book),
    )


def _problem(book: FigureBook) -> str:
    for status in book.latest("reward"):
        if (status.figures.get("failed") or status.figures.get("retried")) and status.figures.get("last_error"):
            return str(status.figures["last_error"])
    return ""


def progress_line(progress: Progress) -> str:
    """One line for a log."""
    return "  ".join(
        [
            f"step {progress.depth}/{progress.steps}",
            f"reward {number(progress.reward_train)} train, {held_out(progress)}",
            f"version {'-' if progress.version is None else progress.version}",
            f"staleness {progress.staleness_mean:.2f} (max {progress.staleness_max:g} of {progress.max_staleness})",
            f"{progress.trajectories_per_s:.0f} trajectories/s",
            f"{progress.tokens_per_s:.0f} tokens/s",
            f"delta {size(progress.delta_bytes)}",
            f"restarts {progress.restarts}",
            *([f"dropped {progress.dropped}"] if progress.dropped else []),
            *([f"reward fails: {progress.problem}"] if progress.problem else []),
        ]
    )


def held_out(progress: Progress) -> str:
    if progress.reward_held_out is None:
        return "held-out -"
    return f"held-out {number(progress.reward_held_out)} (at step {progress.held_out_depth})"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def size(nbytes: float | None) -> str:
    """Bytes for people: 812 B, 34.1 kB, 1.2 MB."""
    if nbytes is None:
        return "-"
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= divisor:
            return f"{nbytes / divisor:.1f} {unit}"
    return f"{nbytes:.0f} B"
