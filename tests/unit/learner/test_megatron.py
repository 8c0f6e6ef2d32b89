"""The Megatron backend in the small: tensor parallel ranks once, where megatron-core is installed, and what needs no ranks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

if not find_spec("megatron"):
    pytest.skip("megatron-core isn't installed", allow_module_level=True)

from support.megatron_checks import check_curve, check_logprobs, check_published, check_resumed, launch
from support.megatron_model import VOCABULARY, make_model
from towline.errors import CorruptError, UsageError
from towline.learner.megatron.architecture import check_parallel, read_architecture
from towline.learner.megatron.backend import MegatronLearner
from towline.learner.megatron.slots import slots_of
from towline.learner.torch_backend import TorchLearner
from unit.learner.conftest import make_batch, settings_for

TP2: dict[str, Any] = {
    "name": "tp2", "model": ("qwen3", True),
    "trainer": {"tp": 2, "learning_rate": 1e-3, "minibatches": 2, "micro_batch_tokens": 30, "warmup_steps": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_groups_left() -> Iterator[None]:
    """Other tests of this process are to find torch as it was."""
    yield
    if torch.distributed.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def test_two_tensor_parallel_ranks_agree_with_one_process(tmp_path: Path) -> None:
    folder = launch(tmp_path, [TP2], 2)
    for check in (check_logprobs, check_published, check_curve, check_resumed):
        check(folder, TP2, 2)


def test_every_tensor_comes_back_from_its_slots(tmp_path: Path) -> None:
    architecture = read_architecture(make_model(tmp_path / "model", "qwen2", tied=False))
    layer = [
        "input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias", "self_attention.linear_proj.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
    ]  # fmt: skip
    names = ["embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"]
    names += [f"decoder.layers.0.{name}" for name in layer]
    shapes = {
        "embedding.word_embeddings.weight": (9, 16), "output_layer.weight": (9, 16), "decoder.final_layernorm.weight": (16,),
        "input_layernorm.weight": (16,), "pre_mlp_layernorm.weight": (16,), "self_attention.linear_qkv.weight": (16, 16),
        "self_attention.linear_qkv.bias": (16,), "self_attention.linear_proj.weight": (16, 8), "mlp.linear_fc1.weight": (32, 16),
        "mlp.linear_fc2.weight": (16, 16),
    }  # fmt: skip
    slots = list(slots_of(architecture, names, 1, 2))
    assert len({slot.name for slot in slots}) == len(slots) == 3 + 7 + 2 + 2 + 1
    ranks = [{name: torch.full(shapes[name.removeprefix("decoder.layers.0.")], -1.0) for name in names} for _ in range(2)]
    for number, slot in enumerate(slots):
        whole = torch.arange(int(np.prod(slot.shape)), dtype=torch.float32).reshape(slot.shape) + 1000 * number
        for rank, parameters in enumerate(ranks):
            part = whole if slot.dimension is None else whole.narrow(slot.dimension, *slot.part(rank, 2))
            slot.write(parameters[slot.parameter], part, rank, 2)
        assert torch.equal(slot.join([parameters[slot.parameter] for parameters in ranks]), whole)
    for number, slot in enumerate(slots):
        whole = torch.arange(int(np.prod(slot.shape)), dtype=torch.float32).reshape(slot.shape) + 1000 * number
        assert torch.equal(slot.join([parameters[slot.parameter] for parameters in ranks]), whole), "another slot overwrote it"
    assert all(bool((tensor >= 0).all()) for parameters in ranks for tensor in parameters.values()), "a slot is missing"
    assert not ranks[1]["output_layer.weight"][VOCABULARY - 9 :].any(), "padding isn't 0"


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"tp": 4}, "trainer.tp = 4 doesn't divide the model's 2 key-value heads"),
        ({"pp": 3}, "trainer.pp = 3 doesn't divide the model's 2 layers"),
    ],
)
def test_a_layout_that_the_model_cant_have_is_refused(tmp_path: Path, trainer: dict[str, int], said: str) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=False)
    with pytest.raises(UsageError, match=said):
        check_parallel(read_architecture(folder), settings_for(folder, backend="megatron", **trainer).trainer)


def test_a_model_that_the_backend_doesnt_do_is_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=False)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "mixtral"'))
    with pytest.raises(UsageError, match="model_type 'mixtral'; use one of llama, qwen2, qwen3"):
        read_architecture(folder)


def test_ranks_that_werent_started_are_missed(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=False)
    with pytest.raises(UsageError, match="dp x tp x pp is 2, and 1 ranks were started"):
        MegatronLearner(folder, settings_for(folder, backend="megatron", tp=2), 0)


def test_a_device_that_isnt_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=False)
    with pytest.raises(UsageError, match="no GPU was found"):
        MegatronLearner(folder, settings_for(folder, backend="megatron", device="cuda:0"), 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(UsageError, match="or hide them with CUDA_VISIBLE_DEVICES"):
        MegatronLearner(folder, settings_for(folder, backend="megatron"), 0)


def test_the_other_backends_checkpoint_is_refused_whole(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=True)
    megatron = MegatronLearner(folder, settings_for(folder, backend="megatron"), 0)
    other = TorchLearner(folder, settings_for(folder), 0)
    megatron.train(make_batch(1))
    before = megatron.state()
    with pytest.raises(CorruptError, match="go on with the backend that wrote it"):
        megatron.restore(other.checkpoint())
    assert all(np.array_equal(raw.data, before[name].data) for name, raw in megatron.state().items())
    with pytest.raises(CorruptError):
        other.restore(megatron.checkpoint())


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=True)
    learner = MegatronLearner(folder, settings_for(folder, backend="megatron"), 0)
    files = learner.checkpoint()
    tensors = load(files["weights-00000.safetensors"])
    del tensors["model.norm.weight"]
    with pytest.raises(CorruptError, match=r"no weights of model\.norm\.weight"):
        learner.restore({**files, "weights-00000.safetensors": save(tensors)})


def test_a_batch_without_a_signal_leaves_the_weights(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", tied=True)
    learner = MegatronLearner(folder, settings_for(folder, backend="megatron"), 0)
    before = learner.state()
    report = learner.train(make_batch(1, advantages=[0.0] * 12))
    assert (report.skipped, report.skip_reasons, report.trained) == ("no_signal", {"no_signal": 1}, False)
    assert all(np.array_equal(raw.data, before[name].data) for name, raw in learner.state().items())
