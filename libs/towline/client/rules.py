"""What a client of the gateway sends, reads and repeats, the same for the sync and the async one.

Every request has an Idempotency-Key of its own, so a repeat is safe whatever became of the first: what was sampled already is
sent again, not sampled again.
"""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from towline.contract.task import VersionSpan
from towline.errors import ConflictError, TowlineError, UnavailableError, UsageError

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 0.2, 5.0
REPEATED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""With WeightVersionNotReady's 409: states that pass."""


class VersionNotReadyError(UnavailableError):
    """No replica serves a version that the request accepts, and none came in the time that was given."""

    default_code = "version_not_ready"

    def __init__(self, message: str, target_version: int | None, applied: int | None) -> None:
        super().__init__(message)
        self.target_version, self.applied = target_version, applied


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One sample. `spans` cover `tokens`: which version sampled each."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    text: str | None
    finish: str
    """stop, length or superseded."""
    spans: list[VersionSpan]
    seed: int
    version_start: int | None
    version_end: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new in a stream. `finish` is set in the last one."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    spans: list[VersionSpan]
    finish: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One answer of a chat. `message` goes back into the conversation as it is."""

    message: dict[str, Any]
    finish: str
    """stop, length, tool_calls or superseded."""
    version_start: int | None
    version_end: int | None
    session: dict[str, Any] | None
    """Of a session's turn: id, node, turns, mismatches."""
    answer: dict[str, Any]
    """All of it, as OpenAI writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """`latest` and its `depth`: the run's; `applied`: the newest that is served; `serving`: version -> replicas."""

    run: str
    latest: int | None
    depth: int | None
    applied: int | None
    serving: dict[int, int]


def new_key() -> str:
    return secrets.token_hex(16)


def headers(token: str, key: str, wait_seconds: float) -> dict[str, str]:
    found = {"Content-Type": "application/json"}
    if key:
        found["Idempotency-Key"] = key
    if wait_seconds:
        found["Prefer"] = f"wait={int(wait_seconds)}"
    if token:
        found["Authorization"] = f"Bearer {token}"
    return found


def generate_body(
    prompt: str | Sequence[int],
    *,
    sampling: Mapping[str, Any] | None,
    min_version: int | None,
    exact_version: int | None,
    session: str | None,
    stream: bool,
) -> bytes:
    """/generate's; equal calls give equal bytes, which the key needs."""
    body: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"input_ids": [int(token) for token in prompt]}
    body |= {"sampling_params": dict(sampling or {}), "return_logprob": True}
    body |= bound(min_version, exact_version)
    if session is not None:
        body["session"] = session
    if stream:
        if body["sampling_params"].get("n", 1) != 1:
            raise UsageError("a stream has one sample: leave sampling['n'] out, and start several", code="stream_samples")
        body |= {"stream": True, "incremental_streaming_output": True}
    return json.dumps(body).encode()


def bound(min_version: int | None, exact_version: int | None) -> dict[str, Any]:
    """The field that says which policy may serve; none where none is asked for."""
    given = {"min_version": min_version, "exact_version": exact_version}
    found = {name: version for name, version in given.items() if version is not None}
    return {"weight_version": found} if found else {}


def read_said(answer: Any) -> Said:
    (choice,) = answer["choices"]
    return Said(
        message={key: value for key, value in choice["message"].items() if value is not None or key == "content"},
        finish=choice["finish_reason"], version_start=answer["weight_version_start"],
        version_end=answer["weight_version_end"], session=answer.get("session"), answer=answer,
    )  # fmt: skip


def read_versions(info: Mapping[str, Any]) -> Versions:
    return Versions(
        run=info["run"], latest=info["latest_version"], depth=info["depth"], applied=info["applied"],
        serving={int(version): replicas for version, replicas in info["versions"].items()},
    )  # fmt: skip


def read_sample(answer: Mapping[str, Any]) -> Generated:
    meta = answer["meta_info"]
    return Generated(
        id=meta["id"], tokens=answer["output_ids"], logprobs=[one[0] for one in meta["output_token_logprobs"]],
        text=answer.get("text"), finish=_finish(meta["finish_reason"]) or "", spans=_spans(meta["spans"]), seed=meta["seed"],
        version_start=meta["weight_version_start"], version_end=meta["weight_version_end"],
    )  # fmt: skip


def read_answer(answer: Any) -> list[Generated]:
    """/generate's: one sample, or a list of them."""
    return [read_sample(one) for one in (answer if isinstance(answer, list) else [answer])]


class Following:
    """Reads a stream's lines. A repeat under the same key begins anew: what was read before is left out."""

    def __init__(self) -> None:
        self._tokens = self._characters = 0
        self._skip_tokens = self._skip_characters = 0
        self.done = False

    def again(self) -> None:
        self._skip_tokens = max(self._skip_tokens, self._tokens)
        self._skip_characters = max(self._skip_characters, self._characters)
        self._tokens = self._characters = 0

    def read(self, line: str) -> Piece | None:
        """What is new in the line, if anything. Raises the error that an `error` event says."""
        if not line.startswith("data: "):
            return None
        if line == "data: [DONE]":
            self.done = True
            return None
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise refusal(503, event)
        meta, tokens, text = event["meta_info"], event["output_ids"], event.get("text") or ""
        cut = min(max(self._skip_tokens - self._tokens, 0), len(tokens))
        cut_text = min(max(self._skip_characters - self._characters, 0), len(text))
        first = self._tokens + cut
        self._tokens += len(tokens)
        self._characters += len(text)
        finish = _finish(meta["finish_reason"])
        if cut == len(tokens) and cut_text == len(text) and finish is None:
            return None
        logprobs = [one[0] for one in meta["output_token_logprobs"]]
        spans = [
            VersionSpan(max(span.start, first), span.end, span.version, span.cut)
            for span in _spans(meta["spans"])
            if span.end > first
        ]
        return Piece(tokens=tokens[cut:], logprobs=logprobs[cut:], text=text[cut_text:], spans=spans, finish=finish)


def passes(status: int, body: Any) -> bool:
    """Whether the same request may be served later."""
    return status in REPEATED or (status == 409 and isinstance(body, dict) and body.get("type") == "WeightVersionNotReady")


def refusal(status: int, body: Any) -> TowlineError:
    """The error that an answer other than 2xx is."""
    tree = body if isinstance(body, dict) else {}
    said = tree.get("error") if isinstance(tree.get("error"), dict) else tree
    assert isinstance(said, dict)
    kind, message = str(said.get("type", "")), str(said.get("message") or f"the gateway answered {status}")
    if kind == "WeightVersionNotReady":
        return VersionNotReadyError(message, said.get("target_version"), said.get("applied"))
    if status in REPEATED:
        return UnavailableError(message, code=kind or "gateway_unavailable")
    if status == 409:
        return ConflictError(message, code="idempotency_key_in_use" if kind == "IdempotencyKeyInUse" else kind or "conflict")
    return UsageError(message, code=kind or f"http_{status}")


class Patience:
    """How long a call is repeated, and how long it waits before each repeat."""

    def __init__(self, seconds: float, clock: Any) -> None:
        self._clock, self._until, self._delay = clock, clock() + seconds, FIRST_DELAY_SECONDS

    def pause(self, retry_after: str | None) -> float | None:
        """Seconds to wait before the next try; None: the time is over."""
        delay = random.uniform(0.5, 1.0) * self._delay
        self._delay = min(2 * self._delay, LONGEST_DELAY_SECONDS)
        if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
            delay = max(delay, float(retry_after[:6]))
        return delay if self._clock() + delay <= self._until else None


def _finish(reason: Mapping[str, Any] | None) -> str | None:
    if reason is None:
        return None
    return "superseded" if reason["type"] == "abort" else str(reason["type"])


def _spans(found: Sequence[Sequence[Any]]) -> list[VersionSpan]:
    return [VersionSpan(*span) for span in found]
