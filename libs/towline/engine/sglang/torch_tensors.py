"""Weights as an update request's payload, the way that SGLang itself unpickles them. For CPU tests: torch is imported here.

Nothing is unpickled on our side, and what is pickled goes to our own child process alone.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterable

import numpy as np
import torch

from towline.delta.state import ModelState
from towline.errors import EngineError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def payload(state: ModelState, names: Iterable[str]) -> str:
    """base64 of the pickled [(name, whole tensor)]. `EngineError` for a dtype that isn't a floating-point one."""
    named = []
    for name in names:
        spec = state[name].spec
        if (dtype := _DTYPES.get(spec.dtype)) is None:
            raise EngineError(f"tensor {name!r} is {spec.dtype}, which doesn't travel as a tensor", code="weights_dtype")
        # A copy: the state's bytes are read-only and stay so.
        values = torch.from_numpy(np.array(state[name].data, dtype=np.uint8).reshape(-1))
        named.append((name, values.view(dtype).reshape(tuple(spec.shape))))
    return base64.b64encode(pickle.dumps(named)).decode()
