"""Micro batches: whatever their size, their packing, recompute and autocast, the gradient is that of one big batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from towline.errors import UsageError
from towline.learner.base import Row, TrainBatch, pack_rows
from towline.learner.torch_backend import TorchLearner
from towline.learner.torch_batch import micro_batch, packed_blocks, padded_blocks
from towline.learner.torch_model import CausalModel, pick
from unit.learner.conftest import make_batch, settings_for

CPU = torch.device("cpu")


def gradients(folder: Path, batch: TrainBatch, **trainer: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Of one optimiser step, before clipping; and the report."""
    found: dict[str, torch.Tensor] = {}
    learner = TorchLearner(folder, settings_for(folder, max_gradient_norm=1e9, **trainer), 5)

    def keep(*_: object) -> None:
        found.update((name, parameter.grad.clone()) for name, parameter in learner._parameters.items())

    learner._optimiser.register_step_pre_hook(keep)
    report = learner.train(batch)
    return found, report


def uneven_batch() -> TrainBatch:
    return make_batch(60, rows=32)


def long_tailed_batch() -> TrainBatch:
    """Most rows are short and a few are long, as responses are."""
    random = np.random.default_rng(8)
    rows = []
    for number in range(48):
        size = int(np.clip(random.lognormal(2.3, 0.7), 4, 60))
        mask = np.r_[np.zeros(2, np.uint8), np.ones(size - 2, np.uint8)]
        rows.append(
            Row(
                group=number // 8, sample=number % 8, tokens=random.integers(0, 17, size).astype(np.int32), loss_mask=mask,
                logprobs=-random.exponential(2.0, size).astype(np.float32), versions=np.zeros(size, np.int32), temperature=1.0,
                advantage=float(random.normal()), staleness=0,
            )
        )  # fmt: skip
    return pack_rows(0, rows)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("loss", "tokens"), [("grpo", 12), ("gspo", 40), ("dr_grpo", 40)])
def test_gradients_are_those_of_one_big_batch(model_folder: Path, loss: str, packing: bool, tokens: int) -> None:
    arguments: dict[str, Any] = {"dr_grpo": {"max_tokens": 9}}.get(loss, {})
    arguments |= {"kl": 0.1, "entropy": 0.01}
    common: dict[str, Any] = {"loss": loss, "loss_arguments": arguments, "correction": "tis"}
    whole, report = gradients(model_folder, uneven_batch(), micro_batch_tokens=10_000, **common)
    parts, other = gradients(model_folder, uneven_batch(), micro_batch_tokens=tokens, packing=packing, **common)
    assert other.loss == pytest.approx(report.loss, rel=1e-5, abs=1e-7)
    assert other.mismatch_kl == pytest.approx(report.mismatch_kl, rel=1e-5)
    for name, gradient in whole.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(parts[name], gradient, atol=2e-6 * max(scale, 1e-3), rtol=2e-5)


def test_every_row_is_in_one_place_and_blocks_keep_to_the_limit() -> None:
    batch = uneven_batch()
    rows = np.random.default_rng(1).permutation(batch.rows)[:31]
    for blocks, width in (
        (padded_blocks(batch, rows, 40), 0),
        (packed_blocks(batch, rows, 40), int(batch.lengths[rows].max()) - 1),
    ):
        assert sorted(row for lines in blocks for line in lines for row in line) == sorted(rows.tolist())
        for lines in blocks:
            longest = max(sum(int(batch.lengths[row]) - 1 for row in line) for line in lines)
            assert len(lines) * longest <= 40
            assert not width or longest <= width


def test_packing_leaves_less_padding_and_the_report_says_how_much(model_folder: Path) -> None:
    shares = {}
    for packing in (False, True):
        _, report = gradients(model_folder, long_tailed_batch(), micro_batch_tokens=400, packing=packing)
        shares[packing] = report.padding_share
    batch = long_tailed_batch()
    filled = int((batch.lengths - 1).sum())
    blocks = [micro_batch(batch, lines, CPU, packed=False) for lines in padded_blocks(batch, np.arange(batch.rows), 400)]
    assert shares[False] == pytest.approx(1 - filled / sum(block.chosen.inputs.numel() for block in blocks))
    assert 0 < shares[True] < 0.5 * shares[False], shares


def test_packed_rows_do_not_see_each_other(model_folder: Path) -> None:
    batch = uneven_batch()
    model = CausalModel(model_folder, "cpu")
    with torch.no_grad():
        for lines in packed_blocks(batch, np.arange(batch.rows), 60):
            block = micro_batch(batch, lines, CPU, packed=True)
            found = pick(model.log_softmax(block.chosen), block.chosen.targets).split([int(n) for n in block.lengths])
            for row, logprobs in zip(block.indices, found, strict=True):
                alone = micro_batch(batch, [[int(row)]], CPU, packed=False)
                torch.testing.assert_close(
                    logprobs, pick(model.log_softmax(alone.chosen), alone.chosen.targets), atol=1e-5, rtol=0
                )


def test_a_model_that_mixes_packed_rows_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(UsageError, match=r"trainer\.packing: qwen3"):
        TorchLearner(model_folder, settings_for(model_folder, packing=True), 0)


def test_recompute_gives_the_same_bits_and_computes_each_layer_twice(model_folder: Path) -> None:
    calls: dict[bool, int] = {}
    found = {}
    for recompute in (False, True):
        learner = TorchLearner(model_folder, settings_for(model_folder, recompute=recompute, micro_batch_tokens=64), 5)
        counter: list[int] = []
        learner._model.module.model.layers[0].mlp.register_forward_pre_hook(lambda *_, counter=counter: counter.append(1))
        report = learner.train(make_batch(61))
        calls[recompute] = len(counter)
        found[recompute] = (report, learner.checkpoint())
    assert calls[True] == 2 * calls[False] > 0
    assert found[True] == found[False]


def test_recompute_keeps_less_for_the_backward_pass(model_folder: Path) -> None:
    kept = {}
    for recompute in (False, True):
        learner = TorchLearner(model_folder, settings_for(model_folder, recompute=recompute), 5)
        block = micro_batch(make_batch(62), [[row] for row in range(12)], CPU, packed=False)
        sizes: list[int] = []

        def pack(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            learner._model.log_softmax(block.chosen)
        kept[recompute] = sum(sizes)
    assert kept[True] < 0.5 * kept[False]


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(model_folder: Path) -> None:
    batch = make_batch(63)
    learner = TorchLearner(model_folder, settings_for(model_folder, dtype="bfloat16"), 5)
    seen: set[torch.dtype] = set()
    learner._model.module.model.layers[0].mlp.down_proj.register_forward_hook(lambda _m, _i, out: seen.add(out.dtype))
    report = learner.train(batch)
    assert seen == {torch.bfloat16}
    assert {parameter.dtype for parameter in learner._parameters.values()} == {torch.float32}
    assert {value.dtype for state in learner._optimiser.state.values() for value in state.values()} == {torch.float32}
    exact = TorchLearner(model_folder, settings_for(model_folder), 5).train(batch)
    assert report.trained
    assert report.loss != exact.loss
    assert report.loss == pytest.approx(exact.loss, rel=0.05, abs=0.02)
    assert report.gradient_norm == pytest.approx(exact.gradient_norm, rel=0.1)


def test_bf16_learns_what_fp32_learns(model_folder: Path) -> None:
    """Many small steps on the same batch: updates below a bf16 step add up in the masters."""
    batch = make_batch(64)
    losses: dict[str, list[float]] = {}
    for dtype in ("float32", "bfloat16"):
        settings = settings_for(model_folder, dtype=dtype, learning_rate=1e-3, loss="cispo")
        learner = TorchLearner(model_folder, settings, 5)
        losses[dtype] = [learner.train(batch).loss for _ in range(15)]
    drop = losses["float32"][0] - losses["float32"][-1]
    assert drop > 0.05
    assert losses["bfloat16"][0] - losses["bfloat16"][-1] == pytest.approx(drop, rel=0.15)


def test_the_probe_is_in_fp32_whatever_the_training_dtype(model_folder: Path) -> None:
    tokens = [3, 1, 4, 1, 5, 9]
    exact = TorchLearner(model_folder, settings_for(model_folder), 0)
    narrow = TorchLearner(model_folder, settings_for(model_folder, dtype="bfloat16"), 0)
    assert narrow.logprobs(tokens, narrow.state()) == exact.logprobs(tokens, exact.state())
