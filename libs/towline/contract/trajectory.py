"""A finished sample: token IDs, who chose each of them, under which policy version, with which probability.

Token IDs are the truth; text is never needed to train. `decode_trajectory` refuses whatever a trainer couldn't trust.
SCHEMA.md beside this file has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from towline.contract.arrays import Array, pack, unpack
from towline.contract.codec import SCHEMA, decode, encode
from towline.contract.task import PromptRef, SamplingParams, VersionSpan
from towline.errors import MalformedError

FinishReason = Literal["stop", "length", "tool_limit", "deadline"]
LogprobKind = Literal["temperature_scaled"]
"""log-softmax after temperature and penalties, before top-k and top-p."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) have one author."""

    start: int
    end: int
    kind: Literal["prompt", "policy", "environment", "tool"]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Unix seconds of the pull and of the end; seconds spent in the queue of the engine and generating."""

    pulled_at: float
    finished_at: float
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0


class GivenReward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward that the sample's own client said when it finished its session; `by` is who it was to the gateway."""

    value: float
    components: dict[str, float] = {}
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """T tokens, the prompt included. Arrays are one-dimensional and as long as `tokens`."""

    run: str
    lane: str
    group: int
    sample: int
    group_size: int
    task_sequence: int
    attempt: int
    prompt_ref: PromptRef
    reference: dict[str, Any]
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    """1 where the policy chose the token."""
    logprobs: npt.NDArray[np.float32]
    """Of the chosen token where loss_mask is 1, else NaN."""
    logprob_kind: LogprobKind = "temperature_scaled"
    version_spans: tuple[VersionSpan, ...]
    """They cover exactly the policy tokens, in order."""
    segments: tuple[Segment, ...]
    finish: FinishReason
    sampling: SamplingParams
    seed: int
    engine: str
    replica: str
    timings: Timings
    given_reward: GivenReward | None = None
    """Counts where gateway.sessions.client_rewards allows it; else, as where there's none, a verifier judges the sample."""

    @property
    def version_start(self) -> int:
        return self.version_spans[0].version

    @property
    def version_end(self) -> int:
        return self.version_spans[-1].version

    @property
    def policy_tokens(self) -> int:
        return int(self.loss_mask.sum())


class _Wire(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    run: str
    lane: str
    group: int
    sample: int
    group_size: int
    task_sequence: int
    attempt: int
    prompt_ref: PromptRef
    reference: dict[str, Any]
    tokens: Array
    loss_mask: Array
    logprobs: Array
    logprob_kind: LogprobKind
    version_spans: tuple[VersionSpan, ...]
    version_start: int
    version_end: int
    segments: tuple[Segment, ...]
    finish: FinishReason
    sampling: SamplingParams
    seed: int
    engine: str
    replica: str
    timings: Timings
    given_reward: GivenReward | msgspec.UnsetType = msgspec.UNSET
    checksum: int
    """xxh3-64 of the bytes of tokens, loss_mask and logprobs, in this order, before packing."""


_decoder = msgspec.msgpack.Decoder(_Wire)
_PLAIN = (
    "run", "lane", "group", "sample", "group_size", "task_sequence", "attempt", "prompt_ref", "reference", "logprob_kind",
    "version_spans", "segments", "finish", "sampling", "seed", "engine", "replica", "timings",
)  # fmt: skip


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """Checked, then packed. Raises `MalformedError` as `decode_trajectory` would."""
    check_trajectory(trajectory)
    return encode(
        _Wire(
            **{name: getattr(trajectory, name) for name in _PLAIN},
            given_reward=msgspec.UNSET if trajectory.given_reward is None else trajectory.given_reward,
            tokens=pack(trajectory.tokens, "<i4"),
            loss_mask=pack(trajectory.loss_mask, "|u1"),
            logprobs=pack(trajectory.logprobs, "<f4"),
            version_start=trajectory.version_start,
            version_end=trajectory.version_end,
            checksum=checksum(trajectory.tokens, trajectory.loss_mask, trajectory.logprobs),
        )
    )


def decode_trajectory(data: bytes) -> Trajectory:
    """The trajectory, its arrays read-only; `MalformedError` (which holds `data`) says what is wrong with it."""
    wire = decode(_decoder, data, "trajectory")
    try:
        trajectory = Trajectory(
            **{name: getattr(wire, name) for name in _PLAIN},
            given_reward=wire.given_reward if isinstance(wire.given_reward, GivenReward) else None,
            tokens=unpack(wire.tokens, "<i4", "tokens"),  # type: ignore[arg-type]
            loss_mask=unpack(wire.loss_mask, "|u1", "loss_mask"),  # type: ignore[arg-type]
            logprobs=unpack(wire.logprobs, "<f4", "logprobs"),  # type: ignore[arg-type]
        )
        check_trajectory(trajectory)
        if (wire.version_start, wire.version_end) != (trajectory.version_start, trajectory.version_end):
            raise MalformedError("version_start or version_end isn't that of the spans", code="spans")
        if wire.checksum != checksum(trajectory.tokens, trajectory.loss_mask, trajectory.logprobs):
            raise MalformedError("the checksum of the arrays differs", code="checksum")
    except MalformedError as error:
        raise MalformedError(f"trajectory {wire.group}.{wire.sample}: {error}", code=error.code, data=data) from error
    return trajectory


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise `MalformedError` unless the arrays agree and every policy token has a version and a finite logprob."""
    mask = trajectory.loss_mask
    if not mask.any():
        raise MalformedError("no token was chosen by the policy", code="empty")
    check_tokens(trajectory.tokens, mask, trajectory.logprobs, trajectory.version_spans, trajectory.segments)


def check_tokens(
    tokens: npt.NDArray[np.int32],
    mask: npt.NDArray[np.uint8],
    logprobs: npt.NDArray[np.float32],
    version_spans: tuple[VersionSpan, ...],
    segments: tuple[Segment, ...],
) -> None:
    """`check_trajectory` for tokens of which none need be the policy's."""
    length = tokens.size
    for name, array in (("loss_mask", mask), ("logprobs", logprobs)):
        if array.size != length:
            raise MalformedError(f"{name} has {array.size} elements, tokens {length}", code="length")
    if length and int(tokens.min()) < 0:
        raise MalformedError("a token ID is negative", code="tokens")
    if length and int(mask.max()) > 1:
        raise MalformedError("loss_mask holds something other than 0 and 1", code="loss_mask")
    chosen = mask.astype(bool)
    if not np.isfinite(logprobs[chosen]).all():
        position = int(np.flatnonzero(chosen & ~np.isfinite(logprobs))[0])
        raise MalformedError(f"the logprob of policy token {position} isn't finite", code="logprobs")
    if chosen.any() and float(logprobs[chosen].max()) > 1e-4:
        raise MalformedError("a logprob is positive", code="logprobs")
    if not np.isnan(logprobs[~chosen]).all():
        raise MalformedError("a token that the policy didn't choose has a logprob", code="logprobs")
    _check_cover("segments", segments, np.ones(length, bool))
    _check_cover("version_spans", version_spans, chosen)
    if not np.array_equal(policy_mask(segments, length), mask):
        raise MalformedError("the policy segments aren't where loss_mask is 1", code="segments")
    if version_spans and version_spans[0].cut != "start":
        raise MalformedError("the first version span doesn't begin with cut=start", code="spans")


def policy_mask(segments: tuple[Segment, ...], length: int) -> npt.NDArray[np.uint8]:
    """uint8[length]: 1 where a segment says that the policy chose the token."""
    mask = np.zeros(length, np.uint8)
    for segment in segments:
        mask[segment.start : segment.end] = segment.kind == "policy"
    return mask


def _check_cover(name: str, spans: tuple[VersionSpan, ...] | tuple[Segment, ...], wanted: npt.NDArray[np.bool_]) -> None:
    covered = np.zeros(wanted.size, bool)
    end = 0
    for span in spans:
        if not end <= span.start < span.end <= wanted.size:
            raise MalformedError(f"{name}: [{span.start}, {span.end}) is empty, out of order or out of range", code="spans")
        covered[span.start : span.end] = True
        end = span.end
    if not np.array_equal(covered, wanted):
        position = int(np.flatnonzero(covered != wanted)[0])
        raise MalformedError(f"{name}: token {position} is {'' if wanted[position] else 'wrongly '}"
                             f"{'un' if wanted[position] else ''}covered", code="spans")  # fmt: skip


def checksum(*arrays: npt.NDArray[np.generic]) -> int:
    """xxh3-64 of the arrays' bytes, one after the other."""
    state = xxhash.xxh3_64()
    for array in arrays:
        state.update(np.ascontiguousarray(array).view(np.uint8).data)
    return state.intdigest()
