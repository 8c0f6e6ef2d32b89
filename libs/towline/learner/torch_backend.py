"""The torch learner: fp32 master weights, AdamW, a Hugging Face causal LM on CPUs or GPUs, alone or on several ranks.

On a CPU everything is a function of (folder, settings, seed, ranks, batches): a restart from a checkpoint goes on bit-exactly.
Several ranks split a batch's rows; their order, the minibatches and every mean are those of the whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers.modeling_utils  # noqa: F401  every model's: two seconds of imports that would come with the first model
from torch import Tensor

from towline.config import Settings
from towline.delta.state import ModelState
from towline.errors import InvariantError
from towline.learner import torch_checkpoint
from towline.learner.base import StepReport, TrainBatch
from towline.learner.diagnostics import Mismatch, RankSums, decode_sums, encode_sums
from towline.learner.losses.base import LossInputs
from towline.learner.objective import Objective, weights_of
from towline.learner.penalties.entropy import entropy
from towline.learner.schedule import Schedule
from towline.learner.sharing import Place, Share
from towline.learner.torch_batch import Indices, MicroBatch, idle_micro_batch, micro_batches
from towline.learner.torch_model import PUBLISH_DTYPES, CausalModel, pick, published, to_raw
from towline.learner.torch_parallel import make_layout, owners, recompute_layers, rounded
from towline.learner.world import World, device_of

NON_FINITE_LOSS, NON_FINITE_GRADIENT = "non_finite_loss", "non_finite_gradient"
NON_FINITE = (NON_FINITE_LOSS, NON_FINITE_GRADIENT)


@dataclass(slots=True)
class _Sums:
    """What a batch's report is made of, over this rank's micro batches."""

    losses: list[float] = field(default_factory=list)
    """Of the optimiser steps, over all ranks."""
    norms: list[float] = field(default_factory=list)
    tokens: float = 0.0
    clipped_low: float = 0.0
    clipped_high: float = 0.0
    entropy: float = 0.0
    positions: int = 0
    filled: int = 0
    mismatch: Mismatch = field(default_factory=Mismatch)
    """Before the first optimiser step."""
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
        self.positions += other.positions
        self.filled += other.filled
        self.mismatch.merge([other.mismatch.plain()])

    def skip(self, reason: str) -> None:
        self.skips[reason] += 1
        self.skipped = reason

    def own(self) -> RankSums:
        return RankSums(
            tokens=self.tokens, clipped_low=self.clipped_low, clipped_high=self.clipped_high, entropy=self.entropy,
            positions=self.positions, filled=self.filled, mismatch=self.mismatch.plain(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Step:
    """One optimiser step's part of a batch."""

    micros: list[MicroBatch]
    """As many on every rank."""
    weights: dict[int, float]
    """Row at hand -> its weight in the loss."""
    tokens: float
    """Policy tokens, over all ranks."""


class TorchLearner:
    """The backend `torch`. `loss_arguments` may also hold `kl` and `entropy`, the weights of those two terms, with any loss."""

    def __init__(self, folder: Path, settings: Settings, seed: int, world: World | None = None) -> None:
        trainer = settings.trainer
        torch.set_num_threads(trainer.threads)
        self._objective = Objective.of(trainer)
        self._settings = trainer
        self._publish_dtype = PUBLISH_DTYPES[settings.model.publish_dtype]
        self._schedule = Schedule(
            trainer.learning_rate, trainer.warmup_steps, settings.run.steps, trainer.final_learning_rate_share
        )
        self._world = world or World()
        device = device_of(trainer.device)
        self._layout = make_layout(trainer.parallel, self._world, torch.device(device))
        self._model = CausalModel(folder, device, getattr(torch, trainer.dtype))
        if trainer.recompute:
            recompute_layers(self._model.module)
        self._layout.hold(self._model, trained=True)
        self._parameters = self._model.parameters()
        self._reference = None
        if self._objective.kl:
            self._reference = CausalModel(folder, device, getattr(torch, trainer.dtype))
            self._layout.hold(self._reference, trained=False)
        if trainer.packing:
            self._model.check_packing()
        self._owners = owners({name: value.numel() for name, value in self._parameters.items()}, self._world.size)
        self._publishers = owners({name: value.numel() for name, value in self._model.tensors().items()}, self._world.size)
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
        return Place(self._world.rank, self._world.size)

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    def state(self) -> ModelState:
        tensors = self._model.tensors()
        self._layout.check_copies(tensors)
        found: ModelState = {}
        for name, tensor in tensors.items():
            whole = self._layout.whole(tensor)
            if self._publishers[name] == self._world.rank:
                found[name] = to_raw(name, published(whole, self._publish_dtype))
        return found

    def logprobs(self, tokens: Sequence[int], state: ModelState | None = None) -> list[float]:
        if state is None or self._world.size == 1:
            return self._model.sequence_logprobs(tokens, state)
        with rounded(self._parameters.values(), self._publish_dtype):
            return self._model.sequence_logprobs(tokens, None)

    def train(self, batch: TrainBatch) -> StepReport:
        if batch.share is None and self._world.size > 1:
            raise InvariantError("several ranks were each given a whole batch; they need their shares", code="share")
        share = batch.share or Share(mine=np.arange(batch.rows), advantages=batch.advantages, policy_tokens=batch.policy_tokens)
        kept = self._objective.kept(share.advantages)
        sums = _Sums()
        rate = self._schedule.at(batch.for_depth + 1)
        if kept.size:
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            order = kept[torch.randperm(kept.size, generator=self._random).numpy()]
            steps = self._steps(batch, share, np.array_split(order, min(self._settings.minibatches, order.size)), kept.size)
            proximal = self._proximal(steps)
            for number, step in enumerate(steps):
                self._optimiser_step(step, proximal, number == 0, sums)
        else:
            sums.skip("no_signal" if share.advantages.size else "no_rows")
        self._skipped_steps += sum(sums.skips[reason] for reason in NON_FINITE)
        return self._report(batch.for_depth, share, kept, rate, sums)

    def checkpoint(self) -> dict[str, bytes]:
        weights: dict[str, Tensor] = {}
        optimiser: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            mine = self._owners[name] == self._world.rank
            # Joining a tensor takes every rank, whoever keeps it.
            whole = {"": self._layout.whole(parameter)}
            whole |= {key: self._layout.whole(value) for key, value in self._optimiser.state.get(parameter, {}).items()}
            if mine:
                weights[name] = whole.pop("").detach().cpu()
                optimiser |= {f"{key}/{name}": value.detach().cpu() for key, value in whole.items()}
        progress = torch_checkpoint.Progress(
            step=self._step,
            skipped_steps=self._skipped_steps,
            random_state=self._random.get_state(),
            parts=self._world.size,
        )
        return torch_checkpoint.write(torch_checkpoint.Part(weights=weights, optimiser=optimiser), self._world.rank, progress)

    def restore(self, files: Mapping[str, bytes]) -> None:
        progress = torch_checkpoint.read_progress(files)
        torch_checkpoint.check_layout(files, progress, self._parameters)
        self._optimiser = self._make_optimiser()
        for part in torch_checkpoint.read_parts(files, progress):
            with torch.no_grad():
                for name, whole in part.weights.items():
                    parameter = self._parameters[name]
                    parameter.copy_(self._layout.part(whole, parameter))
            for key, whole in part.optimiser.items():
                kind, _, name = key.partition("/")
                parameter = self._parameters[name]
                sized = whole.shape == parameter.shape  # AdamW's count of steps is one number
                value = self._layout.part(whole, parameter) if sized and whole.ndim else whole.to(self._model.device)
                self._optimiser.state[parameter][kind] = value
        self._random.set_state(progress.random_state)
        self._step, self._skipped_steps = progress.step, progress.skipped_steps

    def _make_optimiser(self) -> Any:
        """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101); matrices alone decay, norms and biases don't."""
        trainer = self._settings
        matrices = [parameter for parameter in self._parameters.values() if parameter.ndim >= 2]
        others = [parameter for parameter in self._parameters.values() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": trainer.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=trainer.learning_rate, betas=trainer.adam_betas, fused=True
        )

    def _steps(self, batch: TrainBatch, share: Share, minibatches: list[Indices], kept: int) -> list[_Step]:
        """The optimiser steps of a batch. Every rank has as many micro batches in each, were it only to take part."""
        steps = []
        for rows in minibatches:
            lengths = torch.from_numpy(share.policy_tokens[rows].astype(np.float32))
            weights = self._objective.loss.row_weights(lengths, rows.size * share.advantages.size / kept)
            of_row = dict(zip(rows.tolist(), weights.tolist(), strict=True))
            local = share.local(rows)
            micros = micro_batches(
                batch, local, self._settings.micro_batch_tokens, self._model.device, packed=self._settings.packing
            )
            steps.append(_Step(micros, {int(row): of_row[int(share.mine[row])] for row in local}, float(lengths.sum())))
        counts = self._world.all_gather(msgspec.json.encode([len(step.micros) for step in steps]))
        most = np.max([msgspec.json.decode(answer, type=list[int]) for answer in counts], axis=0)
        for step, count in zip(steps, most, strict=True):
            step.micros.extend(idle_micro_batch(self._model.device) for _ in range(int(count) - len(step.micros)))
        return steps

    def _proximal(self, steps: list[_Step]) -> dict[int, Tensor]:
        """Row -> f32[policy tokens] under the weights before the first step. The first minibatch's come with its own pass."""
        if not self._objective.needs_proximal:
            return {}
        found: dict[int, Tensor] = {}
        with torch.no_grad():
            for step in steps[1:]:
                for micro in step.micros:
                    logprobs = pick(self._model.log_softmax(micro.chosen), micro.chosen.targets)
                    pieces = logprobs.split([int(length) for length in micro.lengths])
                    found.update(zip((int(row) for row in micro.indices), pieces, strict=True))
        return found

    def _optimiser_step(self, step: _Step, proximal: dict[int, Tensor], first: bool, sums: _Sums) -> None:
        self._optimiser.zero_grad(set_to_none=True)
        found, total = _Sums(), torch.zeros((), dtype=torch.float64, device=self._model.device)
        for number, micro in enumerate(step.micros):
            with self._layout.accumulating(self._model, last=number + 1 == len(step.micros)):
                loss = self._micro_loss(micro, step, proximal, first, found)
                (loss * self._layout.loss_scale).backward()
            total += loss.detach()
        loss_sum = sum(float(answer) for answer in self._world.all_gather(repr(float(total)).encode()))
        if not np.isfinite(loss_sum):
            return self._skip(NON_FINITE_LOSS, sums)
        parameters = list(self._parameters.values())
        norm = float(self._layout.whole(torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_gradient_norm)))
        if not np.isfinite(norm):
            return self._skip(NON_FINITE_GRADIENT, sums)
        self._optimiser.step()
        self._step += 1
        found.losses.append(loss_sum)
        found.norms.append(norm)
        return sums.add(found)

    def _skip(self, reason: str, sums: _Sums) -> None:
        """Leave the weights, AdamW's moments and its count of steps as they are; the learning rate goes by depth anyway."""
        self._optimiser.zero_grad(set_to_none=True)
        sums.skip(reason)

    def _micro_loss(self, micro: MicroBatch, step: _Step, proximal: dict[int, Tensor], first: bool, sums: _Sums) -> Tensor:
        log_softmax = self._model.log_softmax(micro.chosen)
        logprobs = pick(log_softmax, micro.chosen.targets)
        before = logprobs.detach() if first else None
        if self._objective.needs_proximal and not first:
            pieces = [proximal[int(row)] for row in micro.indices]
            before = torch.cat(pieces) if pieces else micro.behaviour
        if before is not None:
            sums.mismatch.add((before - micro.behaviour).double().cpu().numpy(), micro.staleness)
        old = before if self._objective.needs_proximal and before is not None else micro.behaviour
        reference: Tensor | None = None
        if self._reference is not None:
            with torch.no_grad():
                reference = pick(self._reference.log_softmax(micro.chosen), micro.chosen.targets)
        entropies = entropy(log_softmax) if self._objective.entropy else None
        inputs = LossInputs(
            logprobs=logprobs, old=old, behaviour=micro.behaviour, advantages=micro.advantages, rows=micro.rows,
            lengths=micro.lengths,
        )  # fmt: skip
        row_weights = weights_of(micro.indices, step.weights, logprobs.device)
        loss, terms = self._objective(inputs, row_weights, tokens=step.tokens, reference=reference, entropies=entropies)
        if entropies is not None:
            sums.entropy += float(entropies.detach().sum())
        sums.tokens += micro.rows.numel()
        sums.clipped_low += float(terms.clipped_low.sum())
        sums.clipped_high += float(terms.clipped_high.sum())
        sums.positions += micro.chosen.inputs.numel()
        sums.filled += micro.filled
        return loss

    def _report(self, for_depth: int, share: Share, kept: Indices, rate: float, sums: _Sums) -> StepReport:
        ranks = [decode_sums(answer) for answer in self._world.all_gather(encode_sums(sums.own()))]
        tokens = max(sum(rank.tokens for rank in ranks), 1.0)
        positions = sum(rank.positions for rank in ranks)
        mismatch = Mismatch()
        mismatch.merge([rank.mismatch for rank in ranks])
        return StepReport(
            for_depth=for_depth,
            rows=int(kept.size),
            tokens=int(share.policy_tokens[kept].sum()),
            loss=float(np.mean(sums.losses)) if sums.losses else 0.0,
            learning_rate=rate,
            gradient_norm=float(np.mean(sums.norms)) if sums.norms else 0.0,
            clip_low=sum(rank.clipped_low for rank in ranks) / tokens,
            clip_high=sum(rank.clipped_high for rank in ranks) / tokens,
            mismatch_kl=mismatch.kl,
            logprob_abs_diff=mismatch.abs_diff,
            effective_sample_share=mismatch.effective_sample_share,
            mismatch_kl_by_staleness=mismatch.kl_by_staleness,
            ratio_by_staleness=mismatch.ratio_by_staleness,
            entropy=sum(rank.entropy for rank in ranks) / tokens,
            optimiser_steps=len(sums.losses),
            skipped_steps=sum(sums.skips[reason] for reason in NON_FINITE),
            skipped=sums.skipped,
            skip_reasons=dict(sums.skips),
            padding_share=1.0 - sum(rank.filled for rank in ranks) / positions if positions else 0.0,
        )
