"""Small model states with everything that can be awkward in them, and steps between them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from towline.delta.codec import apply, encode
from towline.delta.state import DTYPE_BYTES, ModelState, RawTensor, TensorSpec, copy_state, layout_of

SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (33, 31), (4096,), (65, 129)]
AWKWARD_BF16 = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0x7FFF, 0x3F80, 0x007F, 0x0080]


def tensor(name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray | bytes) -> RawTensor:
    raw = data if isinstance(data, bytes) else data.tobytes()
    return RawTensor(TensorSpec(name, dtype, shape), np.frombuffer(raw, np.uint8).copy())


def random_state(rng: np.random.Generator, tensors: int = 12, dtypes: tuple[str, ...] = tuple(DTYPE_BYTES)) -> ModelState:
    state = {}
    for index in range(tensors):
        dtype = str(rng.choice(dtypes))
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        spec = TensorSpec(f"layer.{index}.weight", dtype, shape)
        data = rng.integers(0, 256, spec.nbytes).astype(np.uint8)
        if dtype == "BF16" and rng.random() < 0.7:  # like weights: most values within a few octaves
            data = (rng.normal(0, 0.02, spec.elements).astype("<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)
        state[spec.name] = RawTensor(spec, data)
    return state


def step(rng: np.random.Generator, state: ModelState) -> ModelState:
    """Some tensors as they were, some with a few small changes, some with many, some new, some with awkward bits."""
    out = copy_state(state)
    for value in out.values():
        width = DTYPE_BYTES[value.spec.dtype]
        bits = value.data.view(f"<u{width}")
        kind = rng.integers(6)
        if kind == 5:
            value.data[:] = rng.integers(0, 256, value.data.size)
        elif kind:
            share, reach = [(0.003, 2), (0.05, 3), (0.3, 300), (0.95, 4)][int(kind) - 1]
            where = rng.random(bits.size) < share
            shift = rng.integers(-reach, reach + 1, int(where.sum()))
            with np.errstate(over="ignore"):
                bits[where] += shift.astype(f"<i{width}").view(bits.dtype)
        if value.spec.dtype == "BF16" and bits.size and rng.random() < 0.5:
            bits[rng.integers(0, bits.size, 20)] = rng.choice(AWKWARD_BF16, 20)
    return out


seeds = st.integers(0, 2**32 - 1)


def parts_of(base: ModelState | None, new: ModelState, **options: object) -> list[bytes]:
    return [part.data for part in encode(base, new, **options)]  # type: ignore[arg-type]


def applied(base: ModelState, parts: list[bytes], **options: object) -> ModelState:
    state = copy_state(base)
    apply(state, parts, layout=layout_of(base), digests=None, **options)  # type: ignore[arg-type]
    return state


def same(a: ModelState, b: ModelState) -> bool:
    return a.keys() == b.keys() and all(a[name].data.tobytes() == b[name].data.tobytes() for name in a)
