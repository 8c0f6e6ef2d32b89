"""The backend `megatron`: one policy over tensor, pipeline and data parallel ranks, on GPUs (nccl) or CPUs (gloo) alike.

Losses, corrections and advantages are the torch backend's; order of rows, minibatches and weights are too, so both give the same
curve from the same batches.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from towline.config import Settings
from towline.delta.state import ModelState
from towline.learner.base import StepReport, TrainBatch
from towline.learner.diagnostics import Mismatch, RankSums
from towline.learner.losses.base import LossInputs
from towline.learner.megatron import checkpoint
from towline.learner.megatron.architecture import check_parallel, read_architecture, transformer_config
from towline.learner.megatron.batches import Indices, MicroBatch, filled_positions, micro_batches, sequence
from towline.learner.megatron.gathering import Gathering, check_copies
from towline.learner.megatron.model import RankModel, start_parallel
from towline.learner.megatron.optimiser import Optimiser
from towline.learner.megatron.placement import on_device
from towline.learner.megatron.vocabulary import entropies_of, logprobs_of
from towline.learner.objective import Objective, weights_of
from towline.learner.schedule import Schedule
from towline.learner.sharing import Place
from towline.learner.torch_model import PUBLISH_DTYPES, to_raw
from towline.learner.torch_parallel import rounded
from towline.learner.world import World, device_of


@dataclass(slots=True)
class _Sums:
    """What tokens add to the report: one optimiser step's on this rank, then every rank's, then those of the steps taken."""

    loss: float = 0.0
    tokens: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    entropy: float = 0.0
    filled: int = 0
    positions: int = 0
    mismatch: Mismatch = field(default_factory=Mismatch)
    """Before the first optimiser step."""

    def add(self, loss: float, rank: RankSums) -> None:
        self.loss += loss
        self.tokens += rank.tokens
        self.clipped_low += rank.clipped_low
        self.clipped_high += rank.clipped_high
        self.entropy += rank.entropy
        self.filled += rank.filled
        self.positions += rank.positions
        self.mismatch.merge([rank.mismatch])

    def own(self) -> RankSums:
        return RankSums(
            tokens=self.tokens, clipped_low=self.clipped_low, clipped_high=self.clipped_high, entropy=self.entropy,
            positions=self.positions, filled=self.filled, mismatch=self.mismatch.plain(),
        )  # fmt: skip


@dataclass(slots=True)
class _Steps:
    """A batch's optimiser steps; the same on every rank."""

    sums: _Sums = field(default_factory=_Sums)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    skipped: str | None = None
    """The last one's reason."""

    def skip(self, reason: str) -> None:
        self.skips[reason] += 1
        self.skipped = reason


class MegatronLearner:
    """See `towline.learner.base.Learner`. `loss_arguments` may also hold `kl` and `entropy`, as with the torch backend."""

    @on_device
    def __init__(self, folder: Path, settings: Settings, seed: int, world: World | None = None) -> None:
        trainer = settings.trainer
        self._world = world or World()
        torch.set_num_threads(trainer.threads)
        self._objective = Objective.of(trainer)
        self._settings = trainer
        self._publish_dtype = PUBLISH_DTYPES[settings.model.publish_dtype]
        self._schedule = Schedule(
            trainer.learning_rate, trainer.warmup_steps, settings.run.steps, trainer.final_learning_rate_share
        )
        self._device = torch.device(device_of(trainer.device))
        architecture = read_architecture(folder)
        check_parallel(architecture, trainer)
        start_parallel(trainer, self._world, seed)
        self._model = RankModel(architecture, transformer_config(architecture, trainer), self._device)
        self._model.load(folder)
        self._reference: RankModel | None = None
        if self._objective.kl:
            self._reference = RankModel(architecture, transformer_config(architecture, trainer), self._device)
            self._reference.load(folder)
        self._optimiser = Optimiser(self._model, trainer)
        self._optimiser.reload()
        self._gathering = Gathering(self._model)
        self._random = torch.Generator().manual_seed(seed)
        self._multiple = trainer.tp if trainer.sequence_parallel else 1
        self._step = 0
        self._skipped_steps = 0
        data_rank = parallel_state.get_data_parallel_rank()
        self._place = Place(data_rank, trainer.dp, self._world.split(data_rank))

    @property
    def place(self) -> Place:
        return self._place

    @property
    def step(self) -> int:
        return self._step

    @property
    def vocabulary(self) -> int:
        return self._model.architecture.vocabulary

    @on_device
    def state(self) -> ModelState:
        check_copies(self._model, self._world)
        dtype = self._publish_dtype
        owned = self._gathering.owned(lambda name: self._model.parameters[name].detach().to(dtype))
        return {name: to_raw(name, tensor.to("cpu", copy=True)) for name, tensor in owned}

    @on_device
    def logprobs(self, tokens: Sequence[int], state: ModelState | None = None) -> list[float]:
        if len(tokens) < 2:
            return []
        micro = sequence(list(tokens), self._multiple, self._device)
        as_published = rounded(self._model.parameters.values(), self._publish_dtype)
        with as_published if state is not None else contextlib.nullcontext():
            found = self._logprobs_of(self._model, [micro])
        values = found[0] if found else torch.zeros(len(tokens) - 1, device=self._device)
        return [float(value) for value in self._from_last_stage(values)]

    @on_device
    def train(self, batch: TrainBatch) -> StepReport:
        advantages = batch.advantages if batch.share is None else batch.share.advantages
        kept = self._objective.kept(advantages)
        steps = _Steps()
        rate = self._schedule.at(batch.for_depth + 1)
        if kept.size:
            order = kept[torch.randperm(kept.size, generator=self._random).numpy()]
            minibatches = np.array_split(order, min(self._settings.minibatches, order.size))
            proximal = self._proximal(batch, minibatches)
            for number, rows in enumerate(minibatches):
                share = rows.size * advantages.size / kept.size
                self._optimiser_step(batch, rows, share, rate, proximal[number], number == 0, steps)
            self._skipped_steps += steps.skips.total()
        else:
            steps.skip("no_signal" if advantages.size else "no_rows")
        return self._report(batch, kept, rate, steps)

    @on_device
    def checkpoint(self) -> dict[str, bytes]:
        progress = checkpoint.Progress(
            step=self._step,
            skipped_steps=self._skipped_steps,
            optimiser_steps=self._optimiser.steps,
            random_state=self._random.get_state(),
        )
        return checkpoint.write(self._world.rank, self._gathering, self._optimiser, progress)

    @on_device
    def restore(self, files: Mapping[str, bytes]) -> None:
        with self._world.together():
            progress = checkpoint.read(files, self._model, self._optimiser)
        self._random.set_state(progress.random_state)
        self._step, self._skipped_steps = progress.step, progress.skipped_steps

    def _micro_batches(self, batch: TrainBatch, rows: Indices) -> list[MicroBatch]:
        mine = rows if batch.share is None else batch.share.local(rows)
        return micro_batches(batch, mine, self._settings.micro_batch_tokens, self._multiple, self._device)

    def _logprobs_of(self, model: RankModel, micros: list[MicroBatch]) -> list[Tensor]:
        """Each micro batch's f32[N] without gradient; on the last stage, else none."""
        found: list[Tensor] = []

        def collect(logits: Tensor, micro: MicroBatch) -> Tensor:
            found.append(logprobs_of(logits, micro.targets, model.architecture.vocabulary)[0])
            return torch.zeros((), device=logits.device)

        model.module.eval()
        model.run(model.module, micros, collect, train=False)
        model.module.train()
        return found

    def _proximal(self, batch: TrainBatch, minibatches: list[Indices]) -> list[list[Tensor]]:
        """Of each minibatch but the first, whose come with its own pass: logprobs under the weights before the first step."""
        if not self._objective.needs_proximal:
            return [[] for _ in minibatches]
        return [
            [] if number == 0 else self._logprobs_of(self._model, self._micro_batches(batch, rows))
            for number, rows in enumerate(minibatches)
        ]

    def _optimiser_step(
        self, batch: TrainBatch, rows: Indices, share: float, rate: float, proximal: list[Tensor], first: bool, steps: _Steps
    ) -> None:
        counts = (batch.policy_tokens if batch.share is None else batch.share.policy_tokens)[rows]
        lengths = torch.from_numpy(counts.astype(np.float32))
        weights = dict(zip(rows.tolist(), self._objective.loss.row_weights(lengths, share).tolist(), strict=True))
        if batch.share is not None:
            weights = {here: weights[int(there)] for here, there in enumerate(batch.share.mine) if int(there) in weights}
        micros = self._micro_batches(batch, rows)
        reference = self._logprobs_of(self._reference, micros) if self._reference is not None else []
        sums = _Sums()
        order = iter(range(len(micros)))

        def loss_of(logits: Tensor, micro: MicroBatch) -> Tensor:
            place = next(order)
            return self._micro_loss(
                logits, micro, weights, float(lengths.sum()), proximal[place] if proximal else None,
                reference[place] if reference else None, first, sums,
            )  # fmt: skip

        self._optimiser.zero()
        self._model.run(self._optimiser.wrapped, micros, loss_of, train=True)
        sums.filled, sums.positions = filled_positions(micros, batch)
        found = self._of_all_ranks(sums)
        norm = self._optimiser.gradient_norm()
        if math.isfinite(found.loss) and math.isfinite(norm):
            self._optimiser.step(rate, norm)
            self._step += 1
            steps.losses.append(found.loss)
            steps.norms.append(norm)
            steps.sums.add(found.loss, found.own())
        else:
            # The weights, AdamW's moments and its count of steps stay as they are.
            self._optimiser.zero()
            steps.skip("non_finite_gradient" if math.isfinite(found.loss) else "non_finite_loss")

    def _micro_loss(
        self,
        logits: Tensor,
        micro: MicroBatch,
        weights: dict[int, float],
        tokens: float,
        proximal: Tensor | None,
        reference: Tensor | None,
        first: bool,
        sums: _Sums,
    ) -> Tensor:
        """The micro batch's part of the minibatch's loss."""
        if not micro.indices.size:
            return 0.0 * logits.sum()
        logprobs, log_sum = logprobs_of(logits, micro.targets, self.vocabulary)
        before = logprobs.detach() if proximal is None else proximal
        if first or proximal is not None:
            sums.mismatch.add((before - micro.behaviour).double().cpu().numpy(), micro.staleness)
        old = before if self._objective.needs_proximal else micro.behaviour
        entropies = entropies_of(logits, log_sum, self.vocabulary) if self._objective.entropy else None
        inputs = LossInputs(
            logprobs=logprobs, old=old, behaviour=micro.behaviour, advantages=micro.advantages, rows=micro.rows,
            lengths=micro.lengths,
        )  # fmt: skip
        row_weights = weights_of(micro.indices, weights, logprobs.device)
        loss, terms = self._objective(inputs, row_weights, tokens=tokens, reference=reference, entropies=entropies)
        if entropies is not None:
            sums.entropy += float(entropies.detach().sum())
        sums.loss += float(loss.detach())
        sums.tokens += micro.rows.numel()
        sums.clipped_low += float(terms.clipped_low.sum())
        sums.clipped_high += float(terms.clipped_high.sum())
        return loss

    def _of_all_ranks(self, sums: _Sums) -> _Sums:
        """The sum over the ranks, each token once."""
        counts = self._model.last and self._model.tp_rank == 0
        total = _Sums()
        for answer in self._world.all_gather(msgspec.json.encode((repr(sums.loss), sums.own())) if counts else b""):
            if answer:
                loss, rank = msgspec.json.decode(answer, type=tuple[str, RankSums])
                total.add(float(loss), rank)
        return total

    def _from_last_stage(self, values: Tensor) -> Tensor:
        """The last pipeline stage's values, on every rank."""
        group = parallel_state.get_pipeline_model_parallel_group()
        values = values.contiguous()
        dist.broadcast(values, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return values

    def _report(self, batch: TrainBatch, kept: Indices, rate: float, steps: _Steps) -> StepReport:
        counts = batch.policy_tokens if batch.share is None else batch.share.policy_tokens
        sums = steps.sums
        tokens, mismatch = max(sums.tokens, 1.0), sums.mismatch
        return StepReport(
            for_depth=batch.for_depth,
            rows=int(kept.size),
            tokens=int(counts[kept].sum()),
            loss=float(np.mean(steps.losses)) if steps.losses else 0.0,
            learning_rate=rate,
            gradient_norm=float(np.mean(steps.norms)) if steps.norms else 0.0,
            clip_low=sums.clipped_low / tokens,
            clip_high=sums.clipped_high / tokens,
            mismatch_kl=mismatch.kl,
            logprob_abs_diff=mismatch.abs_diff,
            effective_sample_share=mismatch.effective_sample_share,
            mismatch_kl_by_staleness=mismatch.kl_by_staleness,
            ratio_by_staleness=mismatch.ratio_by_staleness,
            entropy=sums.entropy / tokens,
            optimiser_steps=len(steps.losses),
            skipped_steps=steps.skips.total() if kept.size else 0,
            skipped=steps.skipped,
            skip_reasons=dict(steps.skips),
            padding_share=1.0 - sums.filled / sums.positions if sums.positions else 0.0,
        )
