"""What an audit found: counts, and every violation with the sample or record it concerns."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

INVARIANTS = {
    1: "every admitted sample ends in exactly one state",
    2: "a sample counts at most once in the lineage",
    3: "staleness stays within the bound",
    4: "groups are batched whole",
    6: "the trainer computes on the bytes that the engine sampled",
}
"""DESIGN 5's numbers."""


@dataclass(frozen=True, slots=True)
class Violation:
    """`where` names the sample (`GROUP.SAMPLE`), group, batch (`EPOCH/DEPTH`), version or record (`CONTROL 12`)."""

    invariant: int
    where: str
    what: str

    def __str__(self) -> str:
        return f"invariant {self.invariant}, {self.where}: {self.what}"


@dataclass(slots=True)
class Counts:
    """Samples by where they ended, of both lanes: admitted = trained + evaluated + dropped + open."""

    admitted: int = 0
    trained: int = 0
    """In a batch that the lineage has consumed."""
    evaluated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason."""
    turned_away: dict[str, int] = field(default_factory=dict)
    """Scored external samples that were offered and never admitted, by reason: no part of the sum."""
    open: int = 0
    """Anything else: waiting, generating, scored, or in a batch that isn't consumed yet."""

    @property
    def balanced(self) -> bool:
        return self.admitted == self.trained + self.evaluated + sum(self.dropped.values()) + self.open


@dataclass(slots=True)
class AuditReport:
    """`finished` tells a run that ended from a live one, whose open samples are no fault."""

    run: str
    finished: bool
    depth: int
    versions: int
    batches: int
    counts: Counts
    rows_checked: int
    """Batch and eval rows whose trajectory was read and compared."""
    rows_purged: int
    """Rows whose trajectory lies below the stream's floor: they can't be compared any more."""
    purged: dict[str, int]
    """Stream -> messages before its first one: the run didn't keep its history (buffer.keep_history). They aren't lost; what
    they said isn't checked or counted."""
    batches_purged: int
    """Batches of the lineage whose records are purged."""
    staleness_max: int
    """Among the rows within the bound."""
    violations: list[Violation]
    end_reason: str | None = None
    """That of the `end` in force; None while there is none."""
    over_stale: dict[str, int] = field(default_factory=lambda: {"rows": 0, "tokens": 0, "max": 0})
    """`rows` over the bound that the records name, their `tokens` over it, and the greatest staleness (`max`) among them."""

    @property
    def clean(self) -> bool:
        return not self.violations

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        counts = self.counts
        return {
            "run": self.run,
            "clean": self.clean,
            "finished": self.finished,
            "end_reason": self.end_reason,
            "depth": self.depth,
            "versions": self.versions,
            "batches": self.batches,
            "samples": {
                "admitted": counts.admitted,
                "trained": counts.trained,
                "evaluated": counts.evaluated,
                "dropped": dict(sorted(counts.dropped.items())),
                "open": counts.open,
            },
            "turned_away": dict(sorted(counts.turned_away.items())),
            "rows_checked": self.rows_checked,
            "rows_purged": self.rows_purged,
            "purged": dict(self.purged),
            "batches_purged": self.batches_purged,
            "staleness_max": self.staleness_max,
            "over_stale": dict(self.over_stale),
            "violations": [{"invariant": v.invariant, "where": v.where, "what": v.what} for v in self.violations],
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict())

    def lines(self, most: int = 50) -> list[str]:
        """For people; at most `most` violations are spelled out."""
        counts = self.counts
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.dropped.items())) or "none"
        lines = [
            f"run {self.run}: {'finished' if self.finished else 'live'}, depth {self.depth}, {self.versions} versions, "
            f"{self.batches} batches",
            f"samples: {counts.admitted} admitted = {counts.trained} trained + {counts.evaluated} evaluated "
            f"+ {sum(counts.dropped.values())} dropped + {counts.open} open (dropped: {dropped})",
            f"checked: {self.rows_checked} trajectories byte for byte, {self.rows_purged} purged, "
            f"greatest staleness {self.staleness_max}",
        ]
        if self.over_stale["rows"]:
            rows, tokens, most = self.over_stale["rows"], self.over_stale["tokens"], self.over_stale["max"]
            lines.append(f"over the bound, by name: {tokens} tokens in {rows} rows, greatest staleness {most}")
        if counts.turned_away:
            away = ", ".join(f"{n} {reason}" for reason, n in sorted(counts.turned_away.items()))
            lines.append(f"offered from outside and never admitted: {away}")
        if any(self.purged.values()):
            below = ", ".join(f"{count} of {stream}" for stream, count in self.purged.items() if count)
            lines.append(
                f"purged as final and no longer needed: the first {below}; {self.batches_purged} batches among them, which "
                "aren't counted above"
            )
        lines.extend(f"VIOLATED {violation}" for violation in self.violations[:most])
        if len(self.violations) > most:
            lines.append(f"… and {len(self.violations) - most} more")
        lines.append("clean" if self.clean else f"{len(self.violations)} violations")
        return lines
