"""The torch learner: one process, fp32 master weights, AdamW, a Hugging Face causal LM on a CPU or one GPU.

On a CPU everything is a function of (folder, settings, seed, batches): a restart from a checkpoint goes on bit-exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from towline.config import Settings
from towline.delta.state import ModelState
from towline.errors import UsageError
from towline.learner import torch_checkpoint
from towline.learner.base import StepReport, TrainBatch
from towline.learner.corrections.base import Correction
from towline.learner.corrections.none import NoCorrection
from towline.learner.losses.base import Loss, LossInputs, log_ratio
from towline.learner.losses.decoupled_ppo import DecoupledPPO
from towline.learner.penalties.entropy import entropy
from towline.learner.penalties.kl import kl_k3
from towline.learner.registry import CORRECTIONS, LOSSES, build
from towline.learner.schedule import Schedule
from towline.learner.sharing import Place
from towline.learner.torch_batch import Indices, MicroBatch, micro_batches
from towline.learner.torch_model import PUBLISH_DTYPES, CausalModel, pick

NO_SIGNAL = 1e-6
"""An advantage that is smaller says nothing: a group of equal rewards."""

NON_FINITE_LOSS, NON_FINITE_GRADIENT = "non_finite_loss", "non_finite_gradient"
NON_FINITE = (NON_FINITE_LOSS, NON_FINITE_GRADIENT)


@dataclass(slots=True)
class _Sums:
    """What a batch's report is made of."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    entropy: float = 0.0
    differences: list[Tensor] = field(default_factory=list)
    """log(trainer / behaviour) per token, before the first optimiser step."""
    skips: Counter[str] = field(default_factory=Counter)
    """Reason -> optimiser steps left out."""
    skipped: str | None = None
    """The last one's."""

    def add(self, other: _Sums) -> None:
        """Those of an optimiser step that was taken."""
        self.losses += other.losses
        self.norms += other.norms
        self.tokens += other.tokens
        self.clipped_low += other.clipped_low
        self.clipped_high += other.clipped_high
        self.entropy += other.entropy
        self.differences += other.differences

    def skip(self, reason: str) -> None:
        self.skips[reason] += 1
        self.skipped = reason


class TorchLearner:
    """The backend `torch`. `loss_arguments` may also hold `kl` and `entropy`, the weights of those two terms, with any loss."""

    def __init__(self, folder: Path, settings: Settings, seed: int) -> None:
        trainer = settings.trainer
        torch.set_num_threads(trainer.threads)
        arguments = dict(trainer.loss_arguments)
        self._kl = float(arguments.pop("kl", 0.0))
        self._entropy = float(arguments.pop("entropy", 0.0))
        self._loss: Loss = build("trainer.loss", LOSSES, trainer.loss, arguments)
        self._correction: Correction = build("trainer.correction", CORRECTIONS, trainer.correction, trainer.correction_arguments)
        if isinstance(self._loss, DecoupledPPO) and not isinstance(self._correction, NoCorrection):
            raise UsageError(
                "trainer.loss = 'decoupled_ppo' weighs by itself; set trainer.correction = 'none'", code="correction"
            )
        self._needs_proximal = self._loss.needs_proximal or self._correction.needs_proximal
        self._settings = trainer
        self._publish_dtype = PUBLISH_DTYPES[settings.model.publish_dtype]
        self._schedule = Schedule(
            trainer.learning_rate, trainer.warmup_steps, settings.run.steps, trainer.final_learning_rate_share
        )
        self._model = CausalModel(folder, trainer.device)
        self._reference = CausalModel(folder, trainer.device) if self._kl else None
        self._parameters = self._model.parameters()
        self._optimiser = self._make_optimiser()
        self._random = torch.Generator().manual_seed(seed)
        self._step = 0
        self._skipped_steps = 0

    @property
    def step(self) -> int:
        return self._step

    @property
    def skipped_steps(self) -> int:
        """Optimiser steps that the guard against non-finite numbers skipped, since entry 0."""
        return self._skipped_steps

    @property
    def place(self) -> Place:
        return Place()

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    def state(self) -> ModelState:
        return self._model.state(self._publish_dtype)

    def logprobs(self, tokens: Sequence[int], state: ModelState | None = None) -> list[float]:
        return self._model.sequence_logprobs(tokens, state)

    def train(self, batch: TrainBatch) -> StepReport:
        kept = np.arange(batch.rows)
        if not (self._kl or self._entropy):
            kept = np.flatnonzero(np.abs(batch.advantages) > NO_SIGNAL)
        sums = _Sums()
        rate = self._schedule.at(batch.for_depth + 1)
        if kept.size:
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            order = kept[torch.randperm(kept.size, generator=self._random).numpy()]
            minibatches = np.array_split(order, min(self._settings.minibatches, order.size))
            proximal = self._proximal(batch, minibatches)
            for number, rows in enumerate(minibatches):
                share = rows.size * batch.rows / kept.size
                self._optimiser_step(batch, rows, share, proximal, number == 0, sums)
        else:
            sums.skip("no_signal" if batch.rows else "no_rows")
        self._skipped_steps += sums.skips.total() if kept.size else 0
        return self._report(batch, kept, rate, sums)

    def checkpoint(self) -> dict[str, bytes]:
        optimiser = {
            f"{key}/{name}": value
            for name, parameter in self._parameters.items()
            for key, value in self._optimiser.state.get(parameter, {}).items()
        }
        return torch_checkpoint.write(
            torch_checkpoint.LearnerCheckpoint(
                weights=self._parameters,
                optimiser=optimiser,
                random_state=self._random.get_state(),
                step=self._step,
                skipped_steps=self._skipped_steps,
            )
        )

    def restore(self, files: Mapping[str, bytes]) -> None:
        checkpoint = torch_checkpoint.read(files)
        torch_checkpoint.check_layout(checkpoint, self._parameters)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(checkpoint.weights[name])
        self._optimiser = self._make_optimiser()
        for key, value in checkpoint.optimiser.items():
            kind, _, name = key.partition("/")
            self._optimiser.state[self._parameters[name]][kind] = value.to(self._model.device)
        self._random.set_state(checkpoint.random_state)
        self._step, self._skipped_steps = checkpoint.step, checkpoint.skipped_steps

    def _make_optimiser(self) -> Any:
        """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); matrices alone decay, norms and biases don't."""
        trainer = self._settings
        matrices = [parameter for parameter in self._parameters.values() if parameter.ndim >= 2]
        others = [parameter for parameter in self._parameters.values() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": trainer.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=trainer.learning_rate, betas=trainer.adam_betas, fused=True
        )

    def _micro_batches(self, batch: TrainBatch, rows: Indices) -> list[MicroBatch]:
        return list(micro_batches(batch, rows, self._settings.micro_batch_tokens, self._model.device))

    def _proximal(self, batch: TrainBatch, minibatches: list[Indices]) -> dict[int, Tensor]:
        """Row -> f32[policy tokens] under the weights before the first step. The first minibatch's come with its own pass."""
        if not self._needs_proximal:
            return {}
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for rows in minibatches[1:]:
                for micro in self._micro_batches(batch, rows):
                    logprobs = pick(self._model.log_softmax(micro.chosen), micro.chosen.targets)
                    pieces = logprobs.split([int(length) for length in micro.lengths])
                    found.update(zip((int(row) for row in micro.indices), pieces, strict=True))
        return found

    def _optimiser_step(
        self, batch: TrainBatch, rows: Indices, share: float, proximal: dict[int, Tensor], first: bool, sums: _Sums
    ) -> None:
        self._optimiser.zero_grad(set_to_none=True)
        lengths = torch.from_numpy(batch.policy_tokens[rows].astype(np.float32))
        weights = dict(zip(rows.tolist(), self._loss.row_weights(lengths, share).tolist(), strict=True))
        step, total = _Sums(), 0.0
        for micro in self._micro_batches(batch, rows):
            loss = self._micro_loss(micro, weights, float(lengths.sum()), proximal, first, step)
            total += float(loss.detach())
            if not np.isfinite(total):
                return self._skip(NON_FINITE_LOSS, sums)
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), self._settings.max_gradient_norm))
        if not np.isfinite(norm):
            return self._skip(NON_FINITE_GRADIENT, sums)
        self._optimiser.step()
        self._step += 1
        step.losses.append(total)
        step.norms.append(norm)
        return sums.add(step)

    def _skip(self, reason: str, sums: _Sums) -> None:
        """Leave the weights, AdamW's moments and its count of steps as they are; the learning rate goes by depth anyway."""
        self._optimiser.zero_grad(set_to_none=True)
        sums.skip(reason)

    def _micro_loss(
        self, micro: MicroBatch, weights: dict[int, float], tokens: float, proximal: dict[int, Tensor], first: bool, sums: _Sums
    ) -> Tensor:
        log_softmax = self._model.log_softmax(micro.chosen)
        logprobs = pick(log_softmax, micro.chosen.targets)
        before = logprobs.detach() if first else None
        if proximal and not first:
            before = torch.cat([proximal[int(row)] for row in micro.indices])
        if before is not None:
            sums.differences.append((before - micro.behaviour).cpu())
        old = before if self._needs_proximal and before is not None else micro.behaviour
        terms = self._loss(
            LossInputs(
                logprobs=logprobs, old=old, behaviour=micro.behaviour, advantages=micro.advantages, rows=micro.rows,
                lengths=micro.lengths,
            )
        )  # fmt: skip
        row_weights = torch.tensor([weights[int(row)] for row in micro.indices], device=logprobs.device)
        values = terms.values
        if self._correction.needs_proximal:
            values = values * self._correction(log_ratio(old, micro.behaviour), micro.rows, micro.lengths)
        loss = (values * row_weights[micro.rows]).sum()
        if self._reference is not None:
            with torch.no_grad():
                reference = pick(self._reference.log_softmax(micro.chosen), micro.chosen.targets)
            loss = loss + self._kl * kl_k3(logprobs, reference).sum() / tokens
        if self._entropy:
            entropies = entropy(log_softmax)
            loss = loss - self._entropy * entropies.sum() / tokens
            sums.entropy += float(entropies.detach().sum())
        sums.tokens += micro.rows.numel()
        sums.clipped_low += float(terms.clipped_low.sum())
        sums.clipped_high += float(terms.clipped_high.sum())
        return loss

    def _report(self, batch: TrainBatch, kept: Indices, rate: float, sums: _Sums) -> StepReport:
        tokens = max(sums.tokens, 1.0)
        difference = torch.cat(sums.differences).double() if sums.differences else torch.zeros(0, dtype=torch.float64)
        ratio = difference.clamp(-20.0, 20.0).exp()
        some = bool(difference.numel())
        return StepReport(
            for_depth=batch.for_depth,
            rows=int(kept.size),
            tokens=int(batch.policy_tokens[kept].sum()),
            loss=float(np.mean(sums.losses)) if sums.losses else 0.0,
            learning_rate=rate,
            gradient_norm=float(np.mean(sums.norms)) if sums.norms else 0.0,
            clip_low=sums.clipped_low / tokens,
            clip_high=sums.clipped_high / tokens,
            mismatch_kl=float((ratio - 1.0 - difference).mean()) if some else 0.0,
            logprob_abs_diff=float(difference.abs().mean()) if some else 0.0,
            effective_sample_share=float(ratio.sum() ** 2 / (ratio.numel() * (ratio**2).sum())) if some else 0.0,
            entropy=sums.entropy / tokens,
            optimiser_steps=len(sums.losses),
            skipped_steps=sum(count for reason, count in sums.skips.items() if reason in NON_FINITE),
            skipped=sums.skipped,
            skip_reasons=dict(sums.skips),
        )
