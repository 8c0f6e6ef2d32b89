"""The torch learner against a Hugging Face model that is trained by hand, one unpadded row at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from towline.delta.state import model_digest, tensor_digests
from towline.errors import CorruptError, MalformedError, UsageError
from towline.learner.base import Row, TrainBatch, check_row
from towline.learner.export import convert_folder, locate
from towline.learner.torch_backend import TorchLearner
from unit.learner.conftest import VOCABULARY, make_batch, settings_for
from unit.learner.custom_losses import RECORDED


def weights_of(learner: TorchLearner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner._parameters.items()}


def row_logprobs(model: torch.nn.Module, batch: TrainBatch, row: int) -> torch.Tensor:
    """Of the row's policy tokens, by a forward pass over the row alone."""
    start, end = int(batch.starts[row]), int(batch.starts[row + 1])
    tokens = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1] / float(batch.temperatures[row])
    logprobs = torch.log_softmax(logits, -1)[torch.arange(len(tokens) - 1), tokens[1:]]
    return logprobs[torch.from_numpy(batch.loss_mask[start + 1 : end]) == 1]


def test_a_step_is_adamw_on_the_token_mean_of_the_clipped_ratio(model_folder: Path) -> None:
    batch = make_batch(0)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for row in range(batch.rows):
        start, end = int(batch.starts[row]), int(batch.starts[row + 1])
        behaviour = torch.from_numpy(batch.logprobs[start:end][batch.loss_mask[start:end] == 1])
        ratio = (row_logprobs(model, batch, row) - behaviour).exp()
        advantage = float(batch.advantages[row])
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()

    learner = TorchLearner(model_folder, settings_for(model_folder), 0)
    report = learner.train(batch)

    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    assert report.gradient_norm == pytest.approx(float(norm), rel=1e-4)
    assert (report.rows, report.optimiser_steps, learner.step) == (12, 1, 1)
    assert report.tokens == int(batch.loss_mask.sum())
    for name, parameter in model.named_parameters():
        # AdamW's first step is lr x sign of the gradient where that is well above epsilon; 1e-4 is 1% of it.
        torch.testing.assert_close(learner._parameters[name].detach(), parameter.detach(), atol=1e-4, rtol=0)


def test_the_size_of_micro_batches_changes_nothing_but_rounding(model_folder: Path) -> None:
    reports, weights = [], []
    for tokens in (65_536, 16, 1):
        learner = TorchLearner(model_folder, settings_for(model_folder, micro_batch_tokens=tokens, minibatches=2), 5)
        reports.append(learner.train(make_batch(1)))
        weights.append(weights_of(learner))
    for other in (1, 2):
        assert reports[other].loss == pytest.approx(reports[0].loss, rel=1e-4)
        assert reports[other].gradient_norm == pytest.approx(reports[0].gradient_norm, rel=1e-4)
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[other][name], tensor, atol=5e-4, rtol=0)


def test_the_proximal_policy_is_the_one_before_the_first_step(model_folder: Path) -> None:
    batch = make_batch(2)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        before = torch.cat([row_logprobs(model, batch, row) for row in range(batch.rows)])
    RECORDED.clear()
    settings = settings_for(model_folder, loss="unit.learner.custom_losses:Recording", minibatches=3, micro_batch_tokens=20)
    TorchLearner(model_folder, settings, 0).train(batch)
    recorded = torch.cat([inputs.old for inputs in RECORDED])
    current = torch.cat([inputs.logprobs.detach() for inputs in RECORDED])
    assert len(RECORDED) > 3
    torch.testing.assert_close(recorded.sort().values, before.sort().values, atol=1e-5, rtol=0)
    assert float((current.sort().values - before.sort().values).abs().max()) > 1e-2


def test_the_mismatch_figures_are_those_of_the_weights_that_sampled(model_folder: Path) -> None:
    batch = make_batch(3)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        trainer = torch.cat([row_logprobs(model, batch, row) for row in range(batch.rows)]).double().numpy()
    difference = trainer - batch.logprobs[batch.loss_mask == 1]
    weights = np.exp(difference)
    report = TorchLearner(model_folder, settings_for(model_folder), 0).train(batch)
    assert report.logprob_abs_diff == pytest.approx(np.abs(difference).mean(), rel=1e-4)
    assert report.mismatch_kl == pytest.approx((weights - 1 - difference).mean(), rel=1e-4)
    assert report.effective_sample_share == pytest.approx(weights.sum() ** 2 / (weights.size * (weights**2).sum()), rel=1e-4)
    assert report.clip_low + report.clip_high > 0


@pytest.mark.parametrize("correction", ["tis", "icepop", "mask", "sequence_mask"])
def test_a_corrected_step_weighs_the_samples_and_no_gradient_flows_through_the_weight(
    model_folder: Path, correction: str
) -> None:
    """At a batch's first step pi is pi_prox: the ratio is 1, and the gradient that of -mean(w A log pi) with w held fixed."""
    batch = make_batch(14)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    terms, values = [], []
    for row in range(batch.rows):
        start, end = int(batch.starts[row]), int(batch.starts[row + 1])
        behaviour = torch.from_numpy(batch.logprobs[start:end][batch.loss_mask[start:end] == 1])
        logprobs = row_logprobs(model, batch, row)
        ratios = (logprobs.detach() - behaviour).exp()
        mean = float((logprobs.detach() - behaviour).mean().exp())
        weights = {
            "tis": ratios.clamp(max=2.0),
            "icepop": ratios * ((ratios >= 0.5) & (ratios <= 5.0)),
            "mask": ((ratios >= 0.5) & (ratios <= 5.0)).float(),
            "sequence_mask": torch.full_like(ratios, float(0.5 <= mean <= 2.0)),
        }[correction]
        terms.append(-weights * float(batch.advantages[row]) * logprobs)
        values.append(-weights * float(batch.advantages[row]))
    torch.cat(terms).mean().backward()
    report = TorchLearner(model_folder, settings_for(model_folder, correction=correction), 0).train(batch)
    assert report.loss == pytest.approx(float(torch.cat(values).mean()), rel=1e-4, abs=1e-6)
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert report.gradient_norm == pytest.approx(float(norm), rel=1e-4)


def test_figures_by_staleness_and_clip_shares_are_those_of_the_rows(model_folder: Path) -> None:
    batch = dataclasses.replace(make_batch(15), staleness=np.arange(12, dtype=np.int32) % 3)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    ratios: dict[int, list[float]] = {0: [], 1: [], 2: []}
    low = high = 0
    for row in range(batch.rows):
        start, end = int(batch.starts[row]), int(batch.starts[row + 1])
        behaviour = batch.logprobs[start:end][batch.loss_mask[start:end] == 1]
        with torch.no_grad():
            found = np.exp(row_logprobs(model, batch, row).double().numpy() - behaviour)
        ratios[row % 3] += found.tolist()
        low += int(((found < 0.8) & (batch.advantages[row] < 0)).sum())
        high += int(((found > 1.28) & (batch.advantages[row] > 0)).sum())
    report = TorchLearner(model_folder, settings_for(model_folder), 0).train(batch)
    assert report.ratio_by_staleness == pytest.approx({key: np.mean(each) for key, each in ratios.items()}, rel=1e-4)
    kls = {key: np.mean(np.array(each) - 1 - np.log(each)) for key, each in ratios.items()}
    assert report.mismatch_kl_by_staleness == pytest.approx(kls, rel=1e-3)
    tokens = sum(len(each) for each in ratios.values())
    assert (report.clip_low, report.clip_high) == pytest.approx((low / tokens, high / tokens))
    assert low
    assert high


def test_a_restored_learner_goes_on_bit_for_bit(model_folder: Path) -> None:
    settings = settings_for(model_folder, minibatches=2, warmup_steps=3, weight_decay=0.1)
    straight = TorchLearner(model_folder, settings, 11)
    for depth in range(2):
        straight.train(make_batch(20 + depth, for_depth=depth))
    files = straight.checkpoint()
    reports = [straight.train(make_batch(22 + depth, for_depth=2 + depth)) for depth in range(3)]

    restarted = TorchLearner(model_folder, settings, 99)
    restarted.restore(files)
    assert restarted.checkpoint() == files
    assert [restarted.train(make_batch(22 + depth, for_depth=2 + depth)) for depth in range(3)] == reports
    assert restarted.checkpoint() == straight.checkpoint()
    assert tensor_digests(restarted.state()) == tensor_digests(straight.state())


def test_a_checkpoint_is_independent_of_later_steps(model_folder: Path) -> None:
    learner = TorchLearner(model_folder, settings_for(model_folder), 0)
    files, state = learner.checkpoint(), learner.state()
    copies, digest = dict(files), model_digest(tensor_digests(state))
    learner.train(make_batch(4))
    assert files == copies
    assert model_digest(tensor_digests(state)) == digest
    assert model_digest(tensor_digests(learner.state())) != digest


def test_a_foreign_or_torn_checkpoint_is_refused(model_folder: Path) -> None:
    learner = TorchLearner(model_folder, settings_for(model_folder), 0)
    files = learner.checkpoint()
    with pytest.raises(CorruptError, match="KeyError"):
        learner.restore({name: data for name, data in files.items() if name != "learner.json"})
    with pytest.raises(CorruptError):
        learner.restore({**files, "weights.safetensors": files["weights.safetensors"][:-5]})
    with pytest.raises(CorruptError, match="isn't the model's"):
        learner.restore({**files, "weights.safetensors": files["optimiser.safetensors"]})


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(model_folder: Path, kind: str) -> None:
    settings = settings_for(model_folder, loss="unit.learner.custom_losses:Broken", loss_arguments={"kind": kind})
    learner = TorchLearner(model_folder, settings, 0)
    before = weights_of(learner)
    report = learner.train(make_batch(5))
    assert (report.skipped, report.skipped_steps, report.optimiser_steps) == (f"non_finite_{kind}", 1, 0)
    assert not report.trained
    assert report.skip_reasons == {f"non_finite_{kind}": 1}
    assert (learner.step, learner.skipped_steps) == (0, 1)
    for name, tensor in weights_of(learner).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(("kind", "reason"), [("loss", "loss"), ("gradient", "gradient"), ("overflow", "gradient")])
def test_a_skipped_step_leaves_no_trace_in_the_optimiser_or_the_schedule(model_folder: Path, kind: str, reason: str) -> None:
    """Sound, broken, sound; against the same two sound batches without the broken one in between."""
    arguments = {"kind": kind, "first": 1, "last": 1}
    settings = settings_for(
        model_folder, loss="unit.learner.custom_losses:Broken", loss_arguments=arguments, warmup_steps=5, weight_decay=0.1
    )
    learner = TorchLearner(model_folder, settings, 0)
    sound = TorchLearner(model_folder, settings_for(model_folder, loss="unit.learner.custom_losses:Broken",
                         loss_arguments={"kind": "none"}, warmup_steps=5, weight_decay=0.1), 0)  # fmt: skip
    for depth, batch in ((0, make_batch(50)), (2, make_batch(52, for_depth=2))):
        if depth == 2:
            before = learner.checkpoint()["weights.safetensors"]
            report = learner.train(make_batch(51, for_depth=1))
            assert (report.skip_reasons, report.trained) == ({f"non_finite_{reason}": 1}, False)
            assert np.isfinite([report.loss, report.gradient_norm, report.mismatch_kl, report.logprob_abs_diff]).all()
            assert learner.checkpoint()["weights.safetensors"] == before
            torch.randperm(12, generator=sound._random)  # the broken batch's rows were put in order too
        reports = [each.train(batch) for each in (learner, sound)]
        assert reports[0] == reports[1]
        assert reports[0].trained
    assert learner.checkpoint()["weights.safetensors"] == sound.checkpoint()["weights.safetensors"]
    assert learner.checkpoint()["optimiser.safetensors"] == sound.checkpoint()["optimiser.safetensors"]
    assert learner.step == sound.step == 2


def test_the_other_minibatches_of_a_batch_are_still_trained(model_folder: Path) -> None:
    arguments = {"kind": "gradient", "first": 1}
    settings = settings_for(model_folder, loss="unit.learner.custom_losses:Broken", loss_arguments=arguments, minibatches=3)
    learner = TorchLearner(model_folder, settings, 0)
    report = learner.train(make_batch(6))
    assert (report.optimiser_steps, report.skipped_steps, report.skipped) == (1, 2, "non_finite_gradient")
    assert report.trained
    assert report.skip_reasons == {"non_finite_gradient": 2}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights_of(learner).values())


def test_rows_without_a_signal_are_left_out(model_folder: Path) -> None:
    learner = TorchLearner(model_folder, settings_for(model_folder), 0)
    before = weights_of(learner)
    assert learner.train(make_batch(7, advantages=[0.0] * 12)).skipped == "no_signal"
    empty = learner.train(make_batch(7, rows=0))
    assert (empty.skipped, empty.skip_reasons, empty.skipped_steps) == ("no_rows", {"no_rows": 1}, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(learner).items())

    mixed = [0.0 if row % 2 else 1.0 for row in range(12)]
    report = learner.train(make_batch(7, advantages=mixed))
    assert (report.rows, report.skipped) == (6, None)


def test_the_kl_term_pulls_back_to_the_base(model_folder: Path) -> None:
    distances = {}
    for kl in (0.0, 5.0):
        settings = settings_for(model_folder, loss_arguments={"kl": kl})
        learner = TorchLearner(model_folder, settings, 0)
        base = weights_of(learner)
        for depth in range(6):
            learner.train(make_batch(30, for_depth=depth))
        distances[kl] = sum(float((tensor - base[name]).pow(2).sum()) for name, tensor in weights_of(learner).items())
    assert distances[5.0] < 0.7 * distances[0.0]


def test_the_entropy_term_raises_entropy(model_folder: Path) -> None:
    learner = TorchLearner(model_folder, settings_for(model_folder, loss_arguments={"entropy": 1.0}), 0)
    found = [learner.train(make_batch(31, for_depth=depth, advantages=[0.0] * 12)).entropy for depth in range(5)]
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1


def test_the_state_has_the_files_names_and_the_publish_dtype(model_folder: Path, tmp_path: Path) -> None:
    learner = TorchLearner(model_folder, settings_for(model_folder), 0)
    on_disk = load_file(model_folder / "model.safetensors")
    state = learner.state()
    assert set(state) == set(on_disk)
    assert "lm_head.weight" not in state
    for name, raw in state.items():
        assert (raw.spec.dtype, raw.spec.shape) == ("BF16", tuple(on_disk[name].shape))
        assert raw.data.tobytes() == on_disk[name].view(torch.uint8).numpy().tobytes()


def test_published_weights_in_another_process_give_the_same_logprobs(model_folder: Path, tmp_path: Path) -> None:
    learner = TorchLearner(model_folder, settings_for(model_folder), 0)
    learner.train(make_batch(8))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    state = learner.state()
    tensors = {
        name: torch.from_numpy(raw.data.copy()).view(torch.bfloat16).reshape(raw.spec.shape) for name, raw in state.items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1)[torch.arange(7), torch.tensor(tokens[1:])].tolist()
    assert learner.logprobs(tokens, state) == pytest.approx(wanted, abs=1e-5)
    assert learner.logprobs(tokens) != pytest.approx(wanted, abs=1e-5)


def test_a_folder_is_converted_to_the_publish_dtype_once(model_folder: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).save_pretrained(wide)
    (wide / "tokenizer.json").write_text("{}")
    convert_folder(wide, tmp_path / "narrow", "bfloat16")
    converted, original = load_file(tmp_path / "narrow" / "model.safetensors"), load_file(model_folder / "model.safetensors")
    assert converted.keys() == original.keys()
    assert all(torch.equal(converted[name], original[name]) for name in original)
    assert (tmp_path / "narrow" / "tokenizer.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "narrow").dtype == torch.bfloat16


def test_what_is_no_model_is_one_line(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        locate(str(tmp_path / "absent"), None)
    with pytest.raises(UsageError, match=r"no config\.json"):
        locate(str(tmp_path), None)
    assert locate(str(model_folder), None) == (model_folder, None)
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    with pytest.raises(UsageError, match=r"no \*\.safetensors"):
        TorchLearner(tmp_path, settings_for(tmp_path), 0)


def test_settings_that_contradict_each_other_are_refused(model_folder: Path) -> None:
    with pytest.raises(UsageError, match="decoupled_ppo"):
        TorchLearner(model_folder, settings_for(model_folder, loss="decoupled_ppo", correction="tis"), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([1, VOCABULARY], np.int32)}, "outside the vocabulary"),
        ({"loss_mask": np.array([1, 1], np.uint8)}, "a token before the first one"),
        ({"loss_mask": np.array([0, 0], np.uint8)}, "needs a policy token"),
        ({"temperature": 0.0}, "greedy"),
        ({"advantage": float("nan")}, "advantage"),
    ],
)
def test_a_row_that_nobody_could_train_on_is_refused(change: dict[str, object], message: str) -> None:
    sound: dict[str, object] = {
        "group": 1,
        "sample": 2,
        "tokens": np.array([1, 2], np.int32),
        "loss_mask": np.array([0, 1], np.uint8),
        "logprobs": np.array([np.nan, -1.0], np.float32),
        "versions": np.array([-1, 0], np.int32),
        "temperature": 1.0,
        "advantage": 0.5,
        "staleness": 0,
    }
    check_row(Row(**sound), VOCABULARY)  # type: ignore[arg-type]
    with pytest.raises(MalformedError, match=message):
        check_row(Row(**{**sound, **change}), VOCABULARY)  # type: ignore[arg-type]
