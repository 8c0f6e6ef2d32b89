"""What a sample has before it is finished, so that whoever gets its task next goes on from there and no token is lost.

One a sample, the last value counts. Its tokens are as strictly checked as a trajectory's; what can't be trusted is thrown
away and the sample begins anew. SCHEMA.md beside this file has the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from towline.contract.arrays import Array, pack, unpack
from towline.contract.codec import SCHEMA, decode, digest, encode
from towline.contract.task import SamplingParams, Task, VersionSpan
from towline.contract.trajectory import Segment, check_tokens, checksum, policy_mask
from towline.errors import MalformedError

Turn = Literal["open", "stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """T tokens, the prompt included; none where a task was begun and nothing came of it yet. Arrays are one-dimensional and
    as long as `tokens`."""

    run: str
    group: int
    sample: int
    task_sequence: int
    """Of the delivery that wrote it; a re-issue of the sample may use it too."""
    delivery: int
    starts: int
    """How often in a row the task was begun without an outcome or a further PARTIAL, this time included."""
    prompt_digest: bytes
    """xxh3-128 of the task's prompt, int32 little endian."""
    environment: str
    sampling: SamplingParams
    seed: int
    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Of the chosen token where the policy chose it, else NaN."""
    version_spans: tuple[VersionSpan, ...]
    segments: tuple[Segment, ...]
    turn: Turn | None
    """Of the last segment, where it's the policy's and unanswered: it goes on, or ended so. None: the policy's turn comes."""
    environment_state: bytes | None
    """What the environment saved after its last answer; None: it can't."""
    engine: str
    replica: str
    at: float
    queue_seconds: float
    generate_seconds: float

    @property
    def policy_tokens(self) -> int:
        return sum(span.end - span.start for span in self.version_spans)

    def is_of(self, task: Task) -> bool:
        """Whether the task asks for exactly what this began."""
        mine = (self.run, self.group, self.sample, self.prompt_digest, self.environment, self.sampling, self.seed)
        return mine == (
            task.run, task.group, task.sample, prompt_digest(task), task.environment, task.sampling, task.seed
        )  # fmt: skip


class _Wire(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    run: str
    group: int
    sample: int
    task_sequence: int
    delivery: int
    starts: int
    prompt_digest: bytes
    environment: str
    sampling: SamplingParams
    seed: int
    tokens: Array
    logprobs: Array
    version_spans: tuple[VersionSpan, ...]
    segments: tuple[Segment, ...]
    turn: Turn | None
    environment_state: bytes | None
    engine: str
    replica: str
    at: float
    queue_seconds: float
    generate_seconds: float
    checksum: int
    """xxh3-64 of the bytes of tokens and logprobs, in this order, before packing, then of environment_state."""


_decoder = msgspec.msgpack.Decoder(_Wire)
_PLAIN = (
    "run", "group", "sample", "task_sequence", "delivery", "starts", "prompt_digest", "environment", "sampling", "seed",
    "version_spans", "segments", "turn", "environment_state", "engine", "replica", "at", "queue_seconds",
    "generate_seconds",
)  # fmt: skip


def prompt_digest(task: Task) -> bytes:
    """xxh3-128 of the prompt's tokens, whatever way they were packed."""
    return digest(task.prompt_tokens.tobytes())


def encode_partial(partial: Partial) -> bytes:
    """Checked, then packed. Raises `MalformedError` as `decode_partial` would."""
    _check(partial)
    return encode(
        _Wire(
            **{name: getattr(partial, name) for name in _PLAIN},
            tokens=pack(partial.tokens, "<i4"),
            logprobs=pack(partial.logprobs, "<f4"),
            checksum=_checksum(partial),
        )
    )


def decode_partial(data: bytes) -> Partial:
    """The PARTIAL, its arrays read-only; `MalformedError` (which holds `data`) says what is wrong with it."""
    wire = decode(_decoder, data, "partial")
    try:
        partial = Partial(
            **{name: getattr(wire, name) for name in _PLAIN},
            tokens=unpack(wire.tokens, "<i4", "tokens"),  # type: ignore[arg-type]
            logprobs=unpack(wire.logprobs, "<f4", "logprobs"),  # type: ignore[arg-type]
        )
        _check(partial)
        if wire.checksum != _checksum(partial):
            raise MalformedError("the checksum of the arrays differs", code="checksum")
    except MalformedError as error:
        raise MalformedError(f"partial {wire.group}.{wire.sample}: {error}", code=error.code, data=data) from error
    return partial


def _check(partial: Partial) -> None:
    mask = policy_mask(partial.segments, partial.tokens.size)
    check_tokens(partial.tokens, mask, partial.logprobs, partial.version_spans, partial.segments)
    if partial.segments and partial.segments[0].kind != "prompt":
        raise MalformedError("the first segment isn't the prompt", code="segments")
    if partial.turn is not None and not (partial.segments and partial.segments[-1].kind == "policy"):
        raise MalformedError("turn without a policy's segment at the end", code="segments")
    if min(partial.starts, partial.delivery) < 0:
        raise MalformedError("starts or delivery is negative", code="starts")


def _checksum(partial: Partial) -> int:
    return checksum(partial.tokens, partial.logprobs, np.frombuffer(partial.environment_state or b"", np.uint8))
