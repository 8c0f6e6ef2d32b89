"""One request's way through a server: what each stream has brought, joined over streams that broke, as a `Generation`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from towline.contract.task import Cut, VersionSpan
from towline.engine.base import GenerateRequest, Generation, GenerationFinish, Progress
from towline.errors import EngineError


@dataclass(frozen=True, slots=True)
class Label:
    """What SGLang's weight_version stands for: each activation has a label of its own, so a return to a version has too."""

    version: int
    cut: Cut


@dataclass(slots=True, eq=False)
class Stream:
    """What one stream has brought: the first `certain` tokens with the versions that they were sampled from."""

    rid: str
    label: str
    """The weights that it began on."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(label, end); they divide the certain tokens."""
    again: bool = False
    """It is being ended to be begun again, and what it still brings doesn't count."""

    @property
    def certain(self) -> int:
        return self.spans[-1][1] if self.spans else 0

    def feed(self, answer: Mapping[str, Any], *, unchanged: bool) -> None:
        """An answer holds the tokens after those before it, an abort's all of them once more, or fewer. Where it lacks the
        spans, its tokens count as long as the weights are `unchanged` since the stream began."""
        if self.again:
            return
        meta = answer["meta_info"]
        total = int(meta.get("completion_tokens") or 0)
        rows = (meta.get("output_token_logprobs") or [])[-total:] if total else []
        at = total - len(rows)
        if at > len(self.tokens):
            raise EngineError(
                f"request {self.rid}: SGLang gave {len(rows)} logprobs for its tokens up to {total}, of which {len(self.tokens)} "
                "had come",
                code="engine_answer",
            )
        if total > len(self.tokens):
            self.tokens[at:] = [int(row[1]) for row in rows]
            self.logprobs[at:] = [float(row[0]) for row in rows]
        if (found := meta.get("weight_versions")) is not None:
            self._divide(found, total)
        elif unchanged and total > self.certain:
            self.spans = [(self.label, total)]

    def _divide(self, found: list[dict[str, Any]], total: int) -> None:
        spans, at = [], 0
        for span in found:
            start, end = int(span["start"]), int(span["end"])
            if start != at or end < start:
                break
            spans.append((str(span["version"]), end))
            at = end
        else:
            if at == total:
                if total > self.certain:
                    self.spans = spans
                return
        raise EngineError(
            f"request {self.rid}: SGLang's version spans {found} don't divide its {total} tokens", code="engine_answer"
        )


@dataclass(slots=True, eq=False)
class Run:
    """One `generate` call: what the streams that ended have left, and the one underway."""

    request: GenerateRequest
    budget: int
    labels: Mapping[str, Label]
    enqueued: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    streams: int = 0
    stream: Stream | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    told: int = 0
    """Tokens that `on_progress` has been called with."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def silent(self) -> Stream | None:
        """The stream underway, where it has brought nothing yet."""
        return self.stream if self.stream is not None and not self.stream.tokens else None

    def begin(self, label: str) -> Stream:
        """The next stream; its `rid` differs from those before it."""
        self.streams += 1
        self.started = self.started or time.perf_counter()
        self.stream = Stream(f"{self.request.request_id}/{self.streams}", label)
        return self.stream

    def body(self, *, seeded: bool) -> dict[str, Any]:
        """The stream's request: go on after what there is."""
        assert self.stream is not None
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
            "rid": self.stream.rid,
            "input_ids": [*self.request.tokens, *self.tokens],
            "sampling_params": params,
            "return_logprob": True,
            "extra_key": self.stream.label,
        }

    def tell(self) -> None:
        """Call `on_progress` where it is due."""
        tell, stream = self.request.on_progress, self.stream
        if tell is None or stream is None or len(self.tokens) + stream.certain - self.told < self.request.progress_every:
            return
        tokens, logprobs, spans = self._joined()
        self.told = len(tokens)
        queued, generated = self._seconds()
        tell(Progress(tokens=tokens, logprobs=logprobs, spans=spans, queue_seconds=queued, generate_seconds=generated))

    def end_stream(self) -> None:
        """Keep what the stream underway has brought."""
        self.tokens, self.logprobs, self.spans = self._joined()
        self.stream = None

    def finished(self, reason: str, *, again: bool) -> GenerationFinish | None:
        """How the request ends after a stream that ended for `reason`; None: begin another stream."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        if len(self.tokens) >= self.budget:
            return "length"
        if self.aborted.is_set():
            return "abort"
        if again or reason in ("lost", "stop", "length"):
            # "stop" at a token that isn't one of ours: the model's own end of sequence, which this request doesn't heed.
            # "length" here: tokens whose version nobody knows were left out.
            return None
        raise EngineError(
            f"request {self.request.request_id}: SGLang ended it after {len(self.tokens)} tokens of {self.budget}: {reason}",
            code="engine_request",
        )

    def generation(self, finish: GenerationFinish) -> Generation:
        queued, generated = self._seconds()
        return Generation(
            tokens=self.tokens, logprobs=self.logprobs, spans=self.spans, finish=finish, queue_seconds=queued,
            generate_seconds=generated,
        )  # fmt: skip

    def _seconds(self) -> tuple[float, float]:
        now = time.perf_counter()
        started = self.started or now
        return started - self.enqueued, now - started

    def _joined(self) -> tuple[list[int], list[float], list[VersionSpan]]:
        stream = self.stream
        if stream is None:
            return list(self.tokens), list(self.logprobs), list(self.spans)
        base, count, spans, at = len(self.tokens), stream.certain, list(self.spans), 0
        for name, end in stream.spans:
            if (label := self.labels.get(name)) is None:
                raise EngineError(
                    f"request {self.request.request_id}: SGLang names the weights {name!r}, which nobody loaded",
                    code="engine_answer",
                )
            _extend(spans, VersionSpan(base + at, base + end, label.version, "start" if base + at == 0 else label.cut))
            at = end
        return self.tokens + stream.tokens[:count], self.logprobs + stream.logprobs[:count], spans


def _extend(spans: list[VersionSpan], span: VersionSpan) -> None:
    if span.start == span.end:
        return
    last = spans[-1] if spans else None
    if last is not None and last.version == span.version:
        spans[-1] = VersionSpan(last.start, span.end, last.version, last.cut)
    else:
        spans.append(span)
