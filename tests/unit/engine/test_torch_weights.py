"""Live weights: a version is written element by element where little changed, and the module holds its bytes afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from towline.contract.task import SamplingParams
from towline.delta.state import ModelState, RawTensor
from towline.engine.base import GenerateRequest
from towline.engine.torch_engine import TorchEngine
from towline.engine.torch_weights import LiveWeights, folder_layout
from unit.engine.models import digest_of, make_model, plain_logprobs, save, state_of

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


def changed_at(state: ModelState, name: str, positions: list[int]) -> ModelState:
    """Another sign at these elements."""
    data = state[name].data.copy()
    data.view("<u2")[positions] ^= 0x8000
    return state | {name: RawTensor(state[name].spec, data)}


def live(tmp_path: Path, dtype: torch.dtype) -> tuple[Any, LiveWeights, ModelState]:
    model = make_model("qwen3-tied", 0)
    layout = folder_layout(save(model, tmp_path / "model"))
    module = type(model)(model.config).to(dtype)
    module.load_state_dict(model.state_dict())
    return module.requires_grad_(False), LiveWeights(module, layout, swap_share=0.1), state_of(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_elements_whose_bytes_differ_are_written(tmp_path: Path, dtype: torch.dtype) -> None:
    module, weights, state = live(tmp_path, dtype)
    new = changed_at(changed_at(state, UP, [0, 5, 777, 2047]), NORM, [31])
    patches = weights.prepare(new, None)
    assert weights.digest() == digest_of(state), "nothing is written yet"
    found = {patch.live.data_ptr(): patch.positions.tolist() for patch in patches if patch.positions is not None}
    tensors = module.state_dict()
    assert found == {tensors[UP].data_ptr(): [0, 5, 777, 2047], tensors[NORM].data_ptr(): [31]}
    weights.write(patches)
    assert weights.digest() == digest_of(new)
    assert weights.prepare(new, None) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_changed_in_many_places_is_filled_beside_and_exchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    module, weights, state = live(tmp_path, dtype)
    new = changed_at(state, UP, list(range(0, 2048, 5)))
    before = module.state_dict()[UP].data_ptr()
    [patch] = weights.prepare(new, None)
    assert patch.positions is None
    assert weights.digest() == digest_of(state)
    weights.write([patch])
    assert weights.digest() == digest_of(new)
    assert module.state_dict()[UP].data_ptr() != before
    other = state_of(make_model("qwen3-tied", 1))
    weights.write(weights.prepare(other, None))
    assert weights.digest() == digest_of(other)


def test_negative_zero_is_told_apart_from_zero(tmp_path: Path) -> None:
    _, weights, state = live(tmp_path, torch.float32)
    data = state[NORM].data.copy()
    data.view("<u2")[:2] = 0
    zeros = state | {NORM: RawTensor(state[NORM].spec, data)}
    weights.write(weights.prepare(zeros, None))
    new = changed_at(zeros, NORM, [1])
    [patch] = weights.prepare(new, {NORM})
    assert patch.positions is not None
    assert patch.positions.tolist() == [1]
    weights.write([patch])
    assert weights.digest() == digest_of(new)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_engine_s_weights_are_not_those_of_the_file_that_it_was_started_on(tmp_path: Path, dtype: str) -> None:
    model = make_model("qwen3-tied", 0)
    folder = save(model, tmp_path / "model")
    engine = TorchEngine(slots=2, dtype=dtype)
    await engine.start(folder, 0)
    with (folder / "model.safetensors").open("r+b") as file:
        body = np.memmap(file, np.uint8, "r+")
        body[-20_000:] = 0x3F
        body.flush()
    assert engine._digest() == digest_of(state_of(model))
    request = GenerateRequest(request_id="r", tokens=[3, 1, 4], sampling=SamplingParams(max_tokens=12), seed=1)
    result = await engine.generate(request)
    if dtype == "float32":
        want = plain_logprobs(model, request.tokens + result.tokens)[2:]
        np.testing.assert_allclose(result.logprobs, want, rtol=0, atol=1e-5)
    await engine.stop()
