"""The synthetic policy: seeded bfloat16 weights of any size, and the steps that change some of them by one ulp."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.store.base import seed_base_state
from towline.store.log import Log
from towline.store.objects import ObjectStore

TENSOR_BYTES = 8 << 20
CONFIG = b'{"architectures": ["TowlineSynthetic"], "vocab_size": 32000, "eos_token_id": 0}'


def weights(nbytes: int, seed: int) -> ModelState:
    """About `nbytes` of bfloat16, normal with the deviation of a transformer's matrices."""
    chance = np.random.default_rng(seed)
    state: ModelState = {}
    left, number = max(nbytes // 2, 1), 0
    while left:
        count = min(left, TENSOR_BYTES // 2)
        bits = chance.normal(0.0, 0.02, count).astype(np.float32).view(np.uint32) >> np.uint32(16)
        name = f"model.layers.{number}.weight"
        state[name] = RawTensor(TensorSpec(name, "BF16", (count,)), bits.astype("<u2").view(np.uint8))
        left, number = left - count, number + 1
    return state


def change(tensor: npt.NDArray[np.uint8], share: float, chance: np.random.Generator) -> npt.NDArray[np.uint8]:
    """A copy of a bfloat16 tensor's bytes in which about `share` of the elements have moved by one ulp."""
    words = tensor.view("<u2").copy()
    count = round(share * words.size)
    if count:
        places = chance.integers(0, words.size, count)
        words[places] ^= np.uint16(1)  # the lowest bit of the mantissa: always finite
    return words.view(np.uint8)


def seed_policy(objects: ObjectStore, run: str, nbytes: int, seed: int, files: Mapping[str, bytes] | None = None) -> None:
    """Entry 0 of the run, with `files` beside the weights. Idempotent."""
    log = Log(objects, run)
    seed_base_state(objects, log, weights(nbytes, seed), {"config.json": CONFIG, **(files or {})}, "synthetic", None, None)
