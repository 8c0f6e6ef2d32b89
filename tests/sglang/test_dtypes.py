"""Weights that are published narrower than the server's, as wide, or wider: exact, exact, refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from support.sglang_model import VOCABULARY, changed, folder_of, oracle, weights
from support.sglang_requests import TOLERANCE, Started, furthest, request
from towline.config import RolloutSettings
from towline.delta.state import ModelState, RawTensor, TensorSpec, model_digest, tensor_digests
from towline.engine.choice import make_engine
from towline.errors import UsageError


def bf16(state: ModelState) -> ModelState:
    """The upper halves of float32."""
    return {
        name: RawTensor(
            TensorSpec(name, "BF16", tensor.spec.shape),
            (tensor.data.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8),
        )
        for name, tensor in state.items()
    }


@pytest.mark.sglang
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_bf16_weights_are_held_exactly(started: Started, base: Path, tmp_path: Path, dtype: str) -> None:
    old = weights(base)
    new, names = changed(old, seed=1)
    engine = await started(model=folder_of(base, bf16(old), tmp_path / "old"), dtype=dtype, weights="loader")
    activation = await engine.activate(bf16(new), 1, "retract", names)
    assert activation.engine_digest == model_digest(tensor_digests(bf16(new)))
    prompt = random.Random(3).choices(range(2, VOCABULARY), k=20)
    fresh = await engine.generate(request("fresh", prompt, 30))
    expected = oracle(folder_of(base, bf16(new), tmp_path / "new"), prompt + fresh.tokens)[19:]
    # A bf16 server rounds every layer's outputs; it is still far nearer to this version than to the one before.
    far = furthest(fresh.logprobs, oracle(tmp_path / "old", prompt + fresh.tokens)[19:])
    assert furthest(fresh.logprobs, expected) < (TOLERANCE if dtype == "float32" else far / 4)


async def test_a_narrower_server_is_refused_before_it_starts(base: Path, tmp_path: Path) -> None:
    engine = make_engine(RolloutSettings(engine="sglang", dtype="bfloat16", arguments={"python": "python3"}))
    (tmp_path / "model").symlink_to(base)
    with pytest.raises(UsageError, match="published as F32, which a bfloat16 engine can't hold exactly"):
        await engine.start(tmp_path / "model", 0)
