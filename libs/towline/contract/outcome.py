"""What became of a task: a score of its trajectory, or a failed attempt.

A score is create-only and names the trajectory's bytes; it repeats what the buffer needs, so that the buffer's memory and
traffic don't grow with payloads. An attempt that failed is never a reward.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from towline.contract.codec import SCHEMA, decode
from towline.contract.task import VersionSpan
from towline.contract.trajectory import FinishReason

FailureStage = Literal[
    "not_ready", "generate", "environment", "stale", "version_moved", "malformed", "verify", "abandoned", "poisoned"
]


class Score(msgspec.Struct, frozen=True, kw_only=True, tag="score", tag_field="kind"):
    """`reward` of the trajectory with `trajectory_digest` (xxh3-128) at `trajectory_sequence` of TRAJECTORY."""

    schema: int = SCHEMA
    run: str
    lane: str
    group: int
    sample: int
    group_size: int
    task_sequence: int
    trajectory_sequence: int
    trajectory_digest: bytes
    reward: float
    components: dict[str, float] = {}
    verifier: str
    policy_tokens: int
    total_tokens: int
    version_spans: tuple[VersionSpan, ...]
    finish: FinishReason


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure", tag_field="kind"):
    """One failed attempt; counted once per (task_sequence, delivery, stage). `final` means: don't try again."""

    schema: int = SCHEMA
    run: str
    lane: str
    group: int
    sample: int
    task_sequence: int
    delivery: int
    stage: FailureStage
    final: bool = False
    reason: str
    replica: str


Outcome = Score | Failure
_decoder: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


def decode_outcome(data: bytes) -> Outcome:
    """A score or a failure; `MalformedError` otherwise."""
    return decode(_decoder, data, "outcome")
