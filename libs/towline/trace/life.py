"""One sample's life as plain data: what was asked for, what came back, what it was worth, and what became of it.

`trace` fills it from a source; `screen` shows it. Times are Unix seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from towline.contract.groups import group_token

Fate = Literal["trained", "skipped", "missing", "batched", "evaluated", "dropped", "scored", "generated", "open"]
"""skipped: its step was consumed without a change of the weights; missing: the trainer can't have had its row; batched: its
batch waits for the trainer; scored, generated, open: it waits for its group, its score, a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A task of the sample: the admission, or an issue again."""

    task_sequence: int
    number: int
    at: float
    reissued: str | None
    """Why it was issued again; None for the admission."""
    not_before_depth: int
    exact_version: int | None
    deadline: float
    cancelled: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSeen:
    """An attempt that failed, or a trajectory that couldn't be scored."""

    at: float
    task_sequence: int
    delivery: int
    stage: str
    final: bool
    reason: str
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSeen:
    """Tokens [start, end) by one version; `depth` is None where the LOG hasn't it."""

    start: int
    end: int
    version: int
    cut: str
    depth: int | None
    on_line: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSeen:
    """Tokens [start, end) by one author: prompt, policy, environment or tool."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSeen:
    """`text` is None where no tokenizer can be read; logprob and version where the policy didn't choose the token."""

    id: int
    text: str | None
    logprob: float | None
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The trajectory that stands for the sample."""

    sequence: int
    digest: str
    at: float
    pulled_at: float
    finished_at: float
    queue_seconds: float
    generate_seconds: float
    replica: str
    engine: str
    attempt: int
    task_sequence: int
    finish: str
    seed: int
    temperature: float
    policy_tokens: int
    spans: tuple[SpanSeen, ...]
    segments: tuple[SegmentSeen, ...] = ()
    tokens: tuple[TokenSeen, ...]
    prompt_text: str | None
    response_text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    at: float
    reward: float
    components: dict[str, float]
    verifier: str
    same_bytes: bool
    """Whether it's a score of the very trajectory that stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSeen:
    """A batch that holds the sample."""

    sequence: int
    epoch: int
    for_depth: int
    at: float
    reward: float
    least_depth: int
    rows: int
    void_by: int | None
    """The epoch whose fork took it out of force; None: it stands."""
    same_bytes: bool
    over_stale_tokens: int = 0
    """Of its policy tokens, those over the staleness bound."""
    over_stale: Literal["mask", "keep"] | None = None
    """What was done with those: no gradient, or trained all the same."""

    @property
    def staleness(self) -> int:
        return self.for_depth - self.least_depth


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSeen:
    """The version that the sample's batch went into."""

    number: int
    depth: int
    at: float
    skipped: bool
    missing_rows: int
    on_line: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A replica's last ack, as seen from a version."""

    replica: str
    version: int
    at: float
    relation: Literal["serves it", "serves a later one", "not there yet", "off the line"]
    probe_max_abs_diff: float | None


@dataclass(slots=True, kw_only=True)
class Life:
    """Everything that is recorded of GROUP.SAMPLE."""

    run: str
    group: int
    sample: int
    lane: str = ""
    group_size: int = 0
    fate: Fate = "open"
    explanation: str = ""
    prompt: dict[str, Any] | None = None
    """source, epoch, index, environment, reference, tokens."""
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[FailureSeen] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    """Reasons of messages of this sample in DEAD."""
    trajectory: Generated | None = None
    malformed: str | None = None
    """Why the stored trajectory can't be decoded."""
    score: Scored | None = None
    group_rewards: dict[int, float] = field(default_factory=dict)
    """Sample -> reward, of the whole group."""
    batches: list[BatchSeen] = field(default_factory=list)
    version: VersionSeen | None = None
    evaluated_version: int | None = None
    evaluated_mean: float | None = None
    dropped: str | None = None
    dropped_at: float | None = None
    requeued: bool = False
    """The drop promised its prompt again."""
    prompt_again_in: int | None = None
    """The new group that has the dropped group's prompt."""
    prompt_of: int | None = None
    """The dropped group whose prompt this group has again."""
    admitted: bool = True
    """False for a group from outside that was never taken in."""
    replicas: list[Serving] = field(default_factory=list)
    control_begins: int = 1
    """CONTROL's first sequence: what was decided before it isn't known any more."""

    @property
    def name(self) -> str:
        return f"{group_token(self.group)}.{self.sample}"

    @property
    def batch(self) -> BatchSeen | None:
        """The one that stands."""
        return next((batch for batch in reversed(self.batches) if batch.void_by is None), None)

    def timeline(self) -> list[tuple[str, float]]:
        """What happened when, in the order of the times."""
        found: list[tuple[str, float]] = []
        for attempt in self.attempts:
            found.append(("admitted" if attempt.reissued is None else f"issued again ({attempt.reissued})", attempt.at))
        found += [(f"failed: {failure.stage}", failure.at) for failure in self.failures]
        if self.trajectory is not None:
            t = self.trajectory
            found += [("pulled by a worker", t.pulled_at), ("finished", t.finished_at), ("in the stream", t.at)]
        if self.score is not None:
            found.append(("scored", self.score.at))
        found += [(f"batched for depth {batch.for_depth}", batch.at) for batch in self.batches]
        if self.dropped_at is not None:
            found.append((f"dropped: {self.dropped}", self.dropped_at))
        if self.version is not None:
            found.append((f"version {self.version.number} committed", self.version.at))
            served = [ack.at for ack in self.replicas if ack.relation == "serves it"]
            found += [(f"version {self.version.number} first served", min(served))] if served else []
        return sorted(found, key=lambda item: item[1])

    def plain(self) -> dict[str, Any]:
        batch = self.batch
        return {
            **asdict(self), "timeline": self.timeline(), "batch": None if batch is None else asdict(batch),
            "staleness": None if batch is None else batch.staleness,
        }  # fmt: skip
