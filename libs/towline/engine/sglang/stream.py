"""One request's way through a server: what each stream has brought, joined over streams that broke, as a `Generation`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from towline.contract.task import Cut, VersionSpan
from towline.engine.base import GenerateRequest, Generation, GenerationFinish
from towline.errors import EngineError


@dataclass(frozen=True, slots=True)
class Label:
    """What SGLang's weight_version stands for: each activation has a label of its own, so a return to a version has too."""

    version: int
    cut: Cut


@dataclass(slots=True, eq=False)
class Run:
    """One `generate` call. `rid` names the stream underway, and differs from those before it."""

    request: GenerateRequest
    budget: int
    enqueued: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    rid: str | None = None
    streams: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    began: bool = False
    """The stream underway has brought something."""
    again: bool = False
    """The stream underway was ended to be begun again."""

    def body(self, salt: str, *, seeded: bool) -> dict[str, Any]:
        """The next stream's request: go on after what there is."""
        self.streams += 1
        self.rid = f"{self.request.request_id}/{self.streams}"
        self.began = self.again = False
        sampling = self.request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": self.budget - len(self.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": not sampling.stop_token_ids,
        }
        if seeded:
            # The server hashes it with a token's place in the sequence, so what goes on draws what it would have drawn.
            params["sampling_seed"] = self.request.seed & (2**63 - 1)
        return {
            "rid": self.rid,
            "input_ids": [*self.request.tokens, *self.tokens],
            "sampling_params": params,
            "return_logprob": True,
            "extra_key": salt,
        }

    def take(self, answer: Mapping[str, Any] | None, labels: Mapping[str, Label]) -> None:
        """Keep what a stream brought: its last answer, which holds all of them."""
        if answer is None or not answer.get("output_ids"):
            return
        tokens = [int(token) for token in answer["output_ids"]]
        rows = answer["meta_info"]["output_token_logprobs"]
        if [int(row[1]) for row in rows] != tokens:
            raise EngineError(
                f"request {self.request.request_id}: SGLang gave logprobs of {len(rows)} tokens for {len(tokens)}",
                code="engine_answer",
            )
        spans, at = answer["meta_info"]["weight_versions"], 0
        base = len(self.tokens)
        for span in spans:
            start, end, label = int(span["start"]), int(span["end"]), labels.get(str(span["version"]))
            if label is None or start != at or end < start:
                raise EngineError(
                    f"request {self.request.request_id}: SGLang's version spans {spans} don't divide its {len(tokens)} tokens",
                    code="engine_answer",
                )
            self._extend(VersionSpan(base + start, base + end, label.version, "start" if base + start == 0 else label.cut))
            at = end
        if at != len(tokens):
            raise EngineError(
                f"request {self.request.request_id}: SGLang's version spans {spans} don't divide its {len(tokens)} tokens",
                code="engine_answer",
            )
        self.tokens += tokens
        self.logprobs += [float(row[0]) for row in rows]

    def _extend(self, span: VersionSpan) -> None:
        if span.start == span.end:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and last.version == span.version:
            self.spans[-1] = VersionSpan(last.start, span.end, last.version, last.cut)
        else:
            self.spans.append(VersionSpan(span.start, span.end, span.version, span.cut))

    def finished(self, reason: str) -> GenerationFinish | None:
        """How the request ends after a stream that ended for `reason`; None: begin another stream."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        if len(self.tokens) >= self.budget:
            return "length"
        if self.aborted.is_set():
            return "abort"
        if reason in ("lost", "stop") or self.again:
            # "stop" at a token that isn't one of ours: the model's own end of sequence, which this request doesn't heed.
            return None
        raise EngineError(
            f"request {self.request.request_id}: SGLang ended it after {len(self.tokens)} tokens of {self.budget}: {reason}",
            code="engine_request",
        )

    def generation(self, finish: GenerationFinish) -> Generation:
        now = time.perf_counter()
        started = self.started or now
        return Generation(
            tokens=self.tokens, logprobs=self.logprobs, spans=self.spans, finish=finish,
            queue_seconds=started - self.enqueued, generate_seconds=now - started,
        )  # fmt: skip
