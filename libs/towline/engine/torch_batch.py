"""Continuous batching on one thread: sequences join, decode a token a step together, and leave.

Per-token bookkeeping is arrays over all rows (`SlotTable`); Python touches a sequence only when it joins, leaves or sees
an activation. New and retracted sequences take the same way: a padded prefill of prompt and output, whose last logits
give the next token.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from towline.contract.task import VersionSpan
from towline.engine.base import GenerateRequest, Generation, GenerationFinish, Progress
from towline.engine.sampling import seed_word, uniforms
from towline.engine.torch_cache import BatchCache, regroup
from towline.engine.torch_sampling import SamplingPlan, draw
from towline.errors import EngineError

Ints = npt.NDArray[np.int64]
_STOP, _LENGTH, _NO_DISTRIBUTION = 1, 2, 3
_NEVER = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine. `ticket` is the engine's own business."""

    request: GenerateRequest
    budget: int
    ticket: Any
    enqueued: float
    started: float = 0.0
    slot: int = -1
    cuts: list[VersionSpan] = field(default_factory=list)
    """Where spans begin; their ends are set when the sequence finishes."""


class SlotTable:
    """Arrays over slots: what each sequence samples with, and what it has generated."""

    def __init__(self, slots: int) -> None:
        self.free = list(range(slots - 1, -1, -1))
        self.sequences: list[Sequence | None] = [None] * slots
        self.seed = np.zeros(slots, np.uint64)
        self.position0 = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.count = np.zeros(slots, np.int64)
        self.budget = np.zeros(slots, np.int64)
        self.tell_at = np.full(slots, _NEVER, np.int64)
        """The count at which the request wants to know what it has."""
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.stops = np.full((slots, 1), -1, np.int64)
        self.tokens = np.zeros((slots, 16), np.int32)
        self.logprobs = np.zeros((slots, 16), np.float32)

    def seat(self, sequence: Sequence) -> int:
        """A free slot for it."""
        slot, request, sampling = self.free.pop(), sequence.request, sequence.request.sampling
        sequence.slot, self.sequences[slot] = slot, sequence
        self.seed[slot], self.position0[slot] = seed_word(request.seed), request.position0
        self.prompt[slot], self.count[slot], self.budget[slot] = len(request.tokens), 0, sequence.budget
        self.tell_at[slot] = _NEVER if request.on_progress is None else request.progress_every
        self.temperature[slot], self.top_p[slot], self.top_k[slot] = sampling.temperature, sampling.top_p, sampling.top_k
        stops = sampling.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, len(stops) - self.stops.shape[1])), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        return slot

    def record(self, slots: Ints, tokens: Ints, logprobs: npt.NDArray[np.float32]) -> Ints:
        """Append one token a slot; returns 0 (goes on), _STOP or _LENGTH for each."""
        count = self.count[slots]
        if (longest := int(count.max())) >= self.tokens.shape[1]:
            more = ((0, 0), (0, max(longest, 16)))
            self.tokens, self.logprobs = np.pad(self.tokens, more), np.pad(self.logprobs, more)
        self.tokens[slots, count], self.logprobs[slots, count] = tokens, logprobs
        self.count[slots] = count + 1
        stopped = (tokens[:, None] == self.stops[slots]).any(1)
        return np.where(stopped, _STOP, np.where(count + 1 >= self.budget[slots], _LENGTH, 0))

    def sequence_tokens(self, slot: int) -> list[int]:
        """Prompt and output."""
        sequence = self.sequences[slot]
        assert sequence is not None
        output: list[int] = self.tokens[slot, : self.count[slot]].tolist()
        return sequence.request.tokens + output

    def progress(self, slot: int) -> tuple[Sequence, Progress]:
        """The sequence with all that it has so far."""
        sequence = self.sequences[slot]
        assert sequence is not None
        count = int(self.count[slot])
        starts = [cut for cut in sequence.cuts if cut.start < count]
        ends = [cut.start for cut in starts[1:]] + [count]
        return sequence, Progress(
            tokens=self.tokens[slot, :count].tolist(),
            logprobs=self.logprobs[slot, :count].tolist(),
            spans=[VersionSpan(cut.start, end, cut.version, cut.cut) for cut, end in zip(starts, ends, strict=True)],
            queue_seconds=sequence.started - sequence.enqueued,
            generate_seconds=time.perf_counter() - sequence.started,
        )

    def release(self, slot: int, finish: GenerationFinish) -> tuple[Sequence, Generation]:
        """Free the slot; the sequence with what it generated."""
        sequence, progress = self.progress(slot)
        self.sequences[slot] = None
        self.free.append(slot)
        return sequence, progress.finished(finish)


class TorchBatch:
    """The running sequences of one module. Not thread-safe: the engine's step thread owns it."""

    def __init__(self, model: torch.nn.Module, slots: int, prefill_tokens: int, version: int) -> None:
        self._model = model
        self._device: torch.device = next(model.parameters()).device
        self._layers = int(model.config.get_text_config().num_hidden_layers)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        # transformers renamed the argument in 5.24.
        self._cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._prefill_tokens = prefill_tokens
        self.version = version
        self._table = SlotTable(slots)
        self._cache: BatchCache | None = None
        self._rows: Ints = np.zeros(0, np.int64)
        """The slot of each row of the cache; -1 where the sequence has left."""
        self._plan: SamplingPlan | None = None
        self.finished: list[tuple[Sequence, Generation | EngineError]] = []
        """Filled by the steps; the owner takes and clears it. An error: the model gave the sequence no distribution."""
        self.progressed: list[tuple[Sequence, Progress]] = []
        """Likewise, of requests that want to know."""

    @property
    def free(self) -> int:
        return len(self._table.free)

    @property
    def running(self) -> int:
        return len(self._table.sequences) - len(self._table.free)

    def holds(self, sequence: Sequence) -> bool:
        """Whether it is still running."""
        return self._table.sequences[sequence.slot] is sequence

    def sequences(self) -> list[Sequence]:
        """Those that run."""
        return [sequence for sequence in self._table.sequences if sequence is not None]

    def admit(self, sequences: list[Sequence]) -> None:
        """Prefill them (at most `free`) and sample a token of each."""
        now = time.perf_counter()
        for sequence in sequences:
            sequence.started = now
            sequence.cuts = [VersionSpan(0, 0, self.version, "start")]
        self._prefill([self._table.seat(sequence) for sequence in sequences])

    def step(self) -> None:
        """One token of every running sequence."""
        if (self._rows < 0).any():
            self._regroup([])
        cache, slots, table = self._cache, self._rows, self._table
        if cache is None:
            return
        count = table.count[slots]
        logits = self._forward(
            table.tokens[slots, count - 1].astype(np.int64)[:, None], (table.prompt[slots] + count - 1)[:, None], cache
        )
        if self._plan is None:
            self._plan = self._plan_of(slots)
        self._rows = self._record(slots, logits, self._plan)

    def retract(self) -> None:
        """Recompute every running sequence under the live weights, and sample its next token."""
        slots = [sequence.slot for sequence in self.sequences()]
        self._cache, self._rows, self._plan = None, np.zeros(0, np.int64), None
        self._prefill(slots)

    def cut(self, kind: Any) -> None:
        """Tokens from here on are the live `version`'s; `kind` is the cut of the span."""
        for sequence in self.sequences():
            at, cuts = int(self._table.count[sequence.slot]), sequence.cuts
            if cuts[-1].start == at:
                cuts.pop()
            cuts.append(VersionSpan(at, at, self.version, kind if cuts else "start"))

    def abort(self, sequence: Sequence) -> None:
        """Finish a running sequence with what it has."""
        self._rows[self._rows == sequence.slot] = -1
        self._plan = None
        self.finished.append(self._table.release(sequence.slot, "abort"))

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of tokens[1:], at temperature 1, from a plain forward pass."""
        ids = torch.tensor([tokens], device=self._device)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        chosen: list[float] = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        return chosen

    def _prefill(self, slots: list[int]) -> None:
        incoming: list[tuple[BatchCache, Ints]] = []
        rows = [self._rows]
        # Longest first: neighbours in a chunk are alike, so little of it is padding.
        texts = sorted(((self._table.sequence_tokens(slot), slot) for slot in slots), key=lambda item: -len(item[0]))
        while texts:
            width = len(texts[0][0])
            chunk, texts = texts[: max(1, self._prefill_tokens // width)], texts[max(1, self._prefill_tokens // width) :]
            ids = np.zeros((len(chunk), width), np.int64)
            for row, (text, _) in enumerate(chunk):
                ids[row, width - len(text) :] = text
            padding = np.array([width - len(text) for text, _ in chunk], np.int64)
            cache = BatchCache(self._layers, padding)
            logits = self._forward(ids, np.maximum(np.arange(width)[None] - padding[:, None], 0), cache)
            chunk_slots = np.array([slot for _, slot in chunk], np.int64)
            left = self._record(chunk_slots, logits, self._plan_of(chunk_slots))
            keep = np.flatnonzero(left >= 0)
            incoming.append((cache, keep))
            rows.append(left[keep])
        self._regroup(incoming)
        self._rows = np.concatenate([self._rows, *rows[1:]])

    def _regroup(self, incoming: list[tuple[BatchCache, Ints]]) -> None:
        keep = np.flatnonzero(self._rows >= 0)
        parts = [(cache, kept) for cache, kept in [(self._cache, keep), *incoming] if cache is not None and kept.size]
        self._rows, self._plan = self._rows[keep], None
        self._cache = regroup(parts) if parts else None

    def _forward(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], cache: BatchCache) -> torch.Tensor:
        output = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            position_ids=torch.from_numpy(positions).to(self._device),
            attention_mask=cache.mask(ids.shape[1], self._device),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _plan_of(self, slots: Ints) -> SamplingPlan:
        table = self._table
        return SamplingPlan.of(
            table.temperature[slots], table.top_k[slots], table.top_p[slots], vocabulary=self._vocabulary, device=self._device
        )

    def _record(self, slots: Ints, logits: torch.Tensor, plan: SamplingPlan) -> Ints:
        """Draw and note a token a row; returns `slots` with -1 where the sequence finished."""
        table = self._table
        uniform = uniforms(table.seed[slots], table.position0[slots] + table.count[slots])
        tokens, logprobs = draw(logits, plan, torch.from_numpy(uniform).to(self._device))
        chosen = logprobs.cpu().numpy()
        outcome = table.record(slots, tokens.cpu().numpy(), chosen)
        outcome[~np.isfinite(chosen)] = _NO_DISTRIBUTION
        for slot in slots[(table.count[slots] >= table.tell_at[slots]) & (outcome == 0)].tolist():
            sequence, progress = table.progress(slot)
            table.tell_at[slot] += sequence.request.progress_every
            self.progressed.append((sequence, progress))
        if not (done := np.flatnonzero(outcome)).size:
            return slots
        left = slots.copy()
        for row in done.tolist():
            sequence, generation = table.release(int(slots[row]), "stop" if outcome[row] == _STOP else "length")
            if outcome[row] == _NO_DISTRIBUTION:
                message = f"request {sequence.request.request_id}: version {self.version} gave logits that aren't finite"
                self.finished.append((sequence, EngineError(message, code="logits_not_finite")))
            else:
                self.finished.append((sequence, generation))
            left[row] = -1
        return left
