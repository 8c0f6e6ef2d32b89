"""What the pages are told, typed. Times are Unix seconds. IDs of samples are text (12.3, ext-12.3): those of groups from outside
are more than JavaScript's numbers hold, and so are seeds."""

from __future__ import annotations

from typing import Any

import msgspec

from towline.contract.groups import group_token


def sample_id(group: int, sample: int) -> str:
    return f"{group_token(group)}.{sample}"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    pass


class ServiceNow(Answer, frozen=True):
    service: str
    replica: str
    ready: bool
    reason: str
    seen_at: float


class StreamNow(Answer, frozen=True):
    name: str
    messages: int
    bytes: int
    max_bytes: int


class Overview(Answer, frozen=True):
    """`reading` is the share of the streams that was read, None once all was; `problem` why nothing more is."""

    run: str
    where: str
    live: bool
    at: float
    reading: float | None
    problem: str
    began_at: float | None
    last_at: float | None
    ended: str | None
    state: str
    depth: int
    steps: int
    version: int | None
    versions: int
    epochs: int
    max_staleness: int
    environment: str
    engine: str
    base: str
    batches: int
    trained_samples: int
    trained_tokens: int
    reward_train: float | None
    reward_held_out: float | None
    reward_held_out_first: float | None
    held_out_depth: int | None
    staleness: dict[int, int]
    trajectories_per_s: float | None
    tokens_per_s: float | None
    delta_bytes_mean: float | None
    delta_share_mean: float | None
    """Wire bytes over the model's."""
    states: dict[str, int]
    kept: int
    """Samples that `states` counts: the newest."""
    trajectories: int
    dropped: dict[str, int]
    failures: dict[str, int]
    dead: dict[str, int]
    serving: list[tuple[int, int]]
    """(version, replicas), the newest first."""
    replicas: int
    publish_to_all_p50_seconds: float | None
    publish_to_all_p99_seconds: float | None
    services: list[ServiceNow]
    streams: list[StreamNow]


class Curves(Answer, frozen=True):
    """Columns. `batches` and `versions` are thinned out to some hundred points: means over neighbours, the highest for `_max`."""

    depth: list[float]
    at: list[float]
    reward: list[float]
    reward_low: list[float]
    reward_high: list[float]
    staleness_mean: list[float]
    staleness_max: list[int]
    tokens_mean: list[float]
    """Policy tokens of a trained sample."""
    eval_depth: list[int]
    eval_mean: list[float]
    version_number: list[int]
    version_depth: list[int]
    wire_bytes: list[float]
    model_bytes: list[float]
    density: list[float]
    encode_seconds: list[float]
    upload_seconds: list[float]
    verify_seconds: list[float]
    first_ack_seconds: list[float | None]
    last_ack_seconds: list[float | None]
    max_staleness: int


class AckSeen(Answer, frozen=True):
    """`after_seconds` from the version's entry to the ack; the clocks are those of the publisher and the replica."""

    replica: str
    at: float
    after_seconds: float
    now: bool
    """Whether it is what the replica serves now."""
    mode: str | None
    prepare_seconds: float | None
    pause_seconds: float | None
    probe_max_abs_diff: float | None
    engine: str | None


class VersionRow(Answer, frozen=True):
    """`kind`: base, version. Numbers that only a version has are None for the base model."""

    number: int
    kind: str
    depth: int
    epoch: int | None
    base: int | None
    at: float
    on_line: bool
    quarantined: bool
    representation: str
    codec: str
    density: float | None
    wire_bytes: int | None
    model_bytes: int | None
    step: int | None
    skipped: list[int]
    missing_rows: int
    checkpoint: str | None
    encode_seconds: float | None
    upload_seconds: float | None
    verify_seconds: float | None
    model_digest: str
    folder: str
    eval_mean: float | None
    serving: int
    acks: list[AckSeen]


class Versions(Answer, frozen=True):
    rows: list[VersionRow]
    next: int | None
    """`before` of the next page."""
    replicas: int


class ReplicaRow(Answer, frozen=True):
    replica: str
    host: str
    engine: str
    state: str
    detail: str
    subscription: str
    version: int | None
    behind_seconds: float | None
    slots: int
    busy: int
    seen_at: float | None
    """None: it isn't in the registry any more; its last ack is what's left."""
    mode: str | None
    ack_at: float | None
    prepare_seconds: float | None
    pause_seconds: float | None
    wire_bytes: int | None
    probe_max_abs_diff: float | None
    probe_tolerance: float | None
    engine_digest: str | None
    failed: dict[int, str]
    history: list[tuple[int, float]]
    """(version, seconds from its publication to the ack)."""


class Replicas(Answer, frozen=True):
    rows: list[ReplicaRow]
    latest: int | None


class TrajectoryRow(Answer, frozen=True):
    id: str
    sequence: int
    lane: str
    state: str
    at: float
    reward: float | None
    step: int | None
    version_start: int | None
    version_end: int | None
    policy_tokens: int
    total_tokens: int
    finish: str | None
    environment: str | None
    prompt: str | None
    """The end of its text, and below the response's beginning; None where no tokenizer can be read."""
    response: str | None


class Trajectories(Answer, frozen=True):
    """`total` counts those of the kept ones that the filter takes, but for `environment`, which is looked up as one reads."""

    rows: list[TrajectoryRow]
    total: int | None
    next: int | None
    kept: int
    newest: int
    reading: float | None


class TokenColumns(Answer, frozen=True):
    """The trajectory's tokens, columns of one length. `logprobs` is None where loss_mask is 0."""

    ids: list[int]
    texts: list[str] | None
    logprobs: list[float | None]


class TrajectoryLife(Answer, frozen=True):
    """`life` is what `towline trace --json` prints, its tokens as columns."""

    id: str
    life: dict[str, Any]
    tokens: TokenColumns | None
    neighbours: list[str]
    """The samples of its group."""


class LetterRow(Answer, frozen=True):
    sequence: int
    stage: str
    at: float
    nbytes: int
    reason: str
    context: dict[str, Any]
    sample: str | None
    """The one that it's about, where it says so."""


class Letters(Answer, frozen=True):
    rows: list[LetterRow]
    next: int | None
    stages: dict[str, int]


class LetterContent(Answer, frozen=True):
    row: LetterRow
    content: Any
