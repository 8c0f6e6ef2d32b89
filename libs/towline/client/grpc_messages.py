"""rollout.proto and policy.proto as the gRPC clients use them: what each call sends, and what is made of what comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, Unpack, cast

import grpc
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from towline.client.rules import Generated, Patience, Piece, VersionNotReadyError, Versions, new_key
from towline.client.steps import Flow, Passed, Refused, Steps, followed, lost, repeated
from towline.contract.task import Cut, VersionSpan
from towline.errors import ConflictError, TowlineError, UnavailableError, UsageError
from towline.pb import policy_pb2, rollout_pb2

Metadata: TypeAlias = tuple[tuple[str, str], ...]
_FINISH = {
    rollout_pb2.FINISH_REASON_STOP: "stop",
    rollout_pb2.FINISH_REASON_LENGTH: "length",
    rollout_pb2.FINISH_REASON_SUPERSEDED: "superseded",
}
_SAMPLING = {"sampling_seed": "seed", "no_stop_trim": "keep_stop"}
"""SGLang's names for some fields of SamplingParams."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A call of RolloutService."""

    request: rollout_pb2.GenerateRequest
    metadata: Metadata


Told: TypeAlias = rollout_pb2.GenerateResponse | rollout_pb2.GenerateEvent | grpc.RpcError | None
"""None: a stream's end."""


class Options(TypedDict, total=False):
    """As `Gateway.generate` has them."""

    sampling: Mapping[str, Any] | None
    min_version: int | None
    exact_version: int | None
    wait_seconds: float
    session: str | None
    key: str | None


@dataclass(frozen=True, slots=True)
class Calls:
    """Both clients' calls as steps."""

    token: str
    patience_seconds: float
    clock: Callable[[], float] = time.monotonic

    def metadata(self, key: str) -> Metadata:
        found = {"idempotency-key": key, "authorization": f"Bearer {self.token}" if self.token else ""}
        return tuple((name, value) for name, value in found.items() if value)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Steps[Rpc, Told, list[Generated]]:
        return repeated(self._rpc(prompt, options), judge, self._patience())

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Flow[Rpc, Piece, Told]:
        rpc = self._rpc(prompt, options)
        if rpc.request.sampling.n > 1:
            raise UsageError("a stream has one sample: leave sampling['n'] out, and start several", code="stream_samples")
        return followed(rpc, Events(), self._patience)

    def _rpc(self, prompt: str | Sequence[int], options: Options) -> Rpc:
        key = options.pop("key", None) or new_key()
        return Rpc(request_of(prompt, **options), self.metadata(key))

    def _patience(self) -> Patience:
        return Patience(self.patience_seconds, self.clock)


def request_of(
    prompt: str | Sequence[int],
    *,
    sampling: Mapping[str, Any] | None = None,
    min_version: int | None = None,
    exact_version: int | None = None,
    wait_seconds: float = 0.0,
    session: str | None = None,
    key: str | None = None,
) -> rollout_pb2.GenerateRequest:
    """`UsageError` where a field of `sampling`, which has SGLang's names, isn't one of SamplingParams'."""
    if isinstance(prompt, str):
        asked = rollout_pb2.Prompt(text=prompt)
    else:
        asked = rollout_pb2.Prompt(tokens=rollout_pb2.TokenIds(ids=[int(token) for token in prompt]))
    given = {_SAMPLING.get(name, name): value for name, value in (sampling or {}).items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    try:
        params = rollout_pb2.SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise UsageError(f"sampling: {error}", code="sampling") from None
    if min_version is not None and exact_version is not None:
        raise UsageError("give min_version or exact_version, not both", code="version_constraint")
    request = rollout_pb2.GenerateRequest(prompts=[asked], sampling=params, wait_seconds=wait_seconds, session=session or "")
    if exact_version is not None:
        request.weight_version.exact_version = exact_version
    elif min_version is not None:
        request.weight_version.min_version = min_version
    return request


class Events:
    """A stream's events; `start` says where each one's tokens stand, characters are counted."""

    def __init__(self) -> None:
        self.done = False
        self._tokens = self._characters = 0
        self._at = 0

    def again(self) -> None:
        self._at = 0

    def read(self, told: Told) -> Sequence[Piece] | Refused:
        if told is None:
            return Refused(UnavailableError("the gateway's stream ended early", code="gateway_stream"), passes=True)
        if isinstance(told, grpc.RpcError):
            return refused(told)
        found = []
        for sample in told.samples:
            cut = min(max(self._tokens - sample.start, 0), len(sample.tokens))
            cut_text = min(max(self._characters - self._at, 0), len(sample.text))
            self._at += len(sample.text)
            finish = _FINISH.get(sample.finish)
            self.done |= finish is not None
            self._tokens = max(self._tokens, sample.start + len(sample.tokens))
            self._characters = max(self._characters, self._at)
            if cut == len(sample.tokens) and cut_text == len(sample.text) and finish is None:
                continue
            first = sample.start + cut
            spans = [VersionSpan(max(s.start, first), s.end, s.version, cast(Cut, s.cut)) for s in sample.spans if s.end > first]
            text = sample.text[cut_text:]
            found.append(
                Piece(
                    tokens=list(sample.tokens[cut:]), logprobs=list(sample.logprobs[cut:]), text=text, spans=spans, finish=finish
                )
            )
        return found


def judge(told: Told) -> Passed[list[Generated]] | Refused:
    if isinstance(told, grpc.RpcError):
        return refused(told)
    assert isinstance(told, rollout_pb2.GenerateResponse)
    return Passed([_generated(sample) for sample in told.samples])


def _generated(sample: rollout_pb2.Sample) -> Generated:
    return Generated(
        id=sample.id, tokens=list(sample.tokens), logprobs=list(sample.logprobs),
        text=sample.text if sample.HasField("text") else None, finish=_FINISH.get(sample.finish, ""),
        spans=[VersionSpan(span.start, span.end, span.version, cast(Cut, span.cut)) for span in sample.spans], seed=sample.seed,
        version_start=sample.weight_version_start if sample.HasField("weight_version_start") else None,
        version_end=sample.weight_version_end if sample.HasField("weight_version_end") else None,
    )  # fmt: skip


def versions_of(status: policy_pb2.PolicyStatus) -> Versions:
    return Versions(
        run=status.run, latest=status.latest_version if status.HasField("latest_version") else None,
        depth=status.latest_depth if status.HasField("latest_depth") else None,
        applied=status.applied if status.HasField("applied") else None,
        serving={one.version: one.replicas for one in status.serving},
    )  # fmt: skip


_PASSES = {
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
"""Without a Refusal that says better: connections that were lost, faults that may be the gateway's alone."""


def refused(error: grpc.RpcError) -> Refused:
    """The error that a status is."""
    code, message = error.code(), error.details() or ""
    status = rpc_status.from_call(error)
    refusal, retry = rollout_pb2.Refusal(), RetryInfo()
    for detail in status.details if status is not None else ():
        detail.Unpack(refusal)
        detail.Unpack(retry)
    if not refusal.type:
        passes = code in _PASSES
        return Refused(lost(f"{code.name}: {message}") if passes else UsageError(message, code=code.name.lower()), passes)
    found: TowlineError
    if refusal.type == "WeightVersionNotReady":
        found = VersionNotReadyError(message, refusal.target_version, refusal.applied if refusal.HasField("applied") else None)
    elif refusal.retryable:
        found = UnavailableError(message, code=refusal.type)
    elif code == grpc.StatusCode.ABORTED:
        found = ConflictError(message, code="idempotency_key_in_use" if refusal.type == "IdempotencyKeyInUse" else refusal.type)
    elif code in _PASSES:
        return Refused(UnavailableError(message, code=refusal.type), passes=True)
    else:
        found = UsageError(message, code=refusal.type)
    after = str(retry.retry_delay.seconds) if retry.HasField("retry_delay") else None
    return Refused(found, refusal.retryable, after)
