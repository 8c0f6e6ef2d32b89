"""Megatron-Core where there is no GPU: it names CUDA devices outright, and they are answered with the CPU while it computes.

Only where tensors lie and what their type is called changes, never a number. With CUDA nothing is touched.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
T = TypeVar("T")


class _OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch isn't typed here
    """`device="cuda"`, `Tensor.cuda()` and `Tensor.type()` as Megatron-Core uses them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class _Stream:
    """The one stream of a CPU: everything is done in order."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event


def _random_state(*_: Any, **__: Any) -> None:
    """Recomputation saves and restores CUDA's random state; there is none, and no dropout that needed one."""


@contextlib.contextmanager
def placed() -> Iterator[None]:
    """Within it Megatron-Core runs on this machine, on the calling thread."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # each thread has a current device of its own
        yield
        return
    from megatron.core.tensor_parallel import random

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "current_stream", lambda *_, **__: _Stream()),
        (random, "_get_cuda_rng_state", _random_state),
        (random, "_set_cuda_rng_state", _random_state),
    ]
    before = [getattr(module, name) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        with _OnCpu():
            yield
    finally:
        for (module, name, _), value in zip(replaced, before, strict=True):
            setattr(module, name, value)


def on_device(function: Callable[P, T]) -> Callable[P, T]:
    """The function within `placed`."""

    @functools.wraps(function)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with placed():
            return function(*args, **kwargs)

    return inside
