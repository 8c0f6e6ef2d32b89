"""Makes the engine that a run's settings name; nothing else is ever taken instead of it."""

from __future__ import annotations

from towline.config import RolloutSettings
from towline.engine.base import Engine
from towline.errors import UsageError


def make_engine(settings: RolloutSettings, replica: str = "") -> Engine:
    """`settings.arguments` are the engine's own keyword arguments; the synthetic one may differ by `replica`. `UsageError` where
    it isn't installed or refuses them."""
    try:
        if settings.engine == "torch":
            from towline.engine.torch_engine import TorchEngine

            return TorchEngine(
                slots=settings.slots, device=settings.device, dtype=settings.dtype, threads=settings.threads,
                max_context_tokens=settings.max_context_tokens, **settings.arguments,
            )  # fmt: skip
        if settings.engine == "sglang":
            from towline.engine.sglang.engine import SglangEngine

            return SglangEngine(
                slots=settings.slots, device=settings.device, dtype=settings.dtype, threads=settings.threads,
                max_context_tokens=settings.max_context_tokens, **settings.arguments,
            )  # fmt: skip
        if settings.engine == "synthetic":
            from towline.engine.synthetic import SyntheticEngine

            return SyntheticEngine(
                slots=settings.slots, max_context_tokens=settings.max_context_tokens, replica=replica, **settings.arguments
            )
    except ModuleNotFoundError as error:
        raise UsageError(
            f"rollout.engine = {settings.engine!r} needs {error.name}; install towline[torch]", code="engine_missing"
        ) from error
    except TypeError as error:
        raise UsageError(f"rollout.arguments: {error}", code="engine_arguments") from error
    raise UsageError(
        f"rollout.engine = {settings.engine!r} isn't part of this installation; use 'torch', 'sglang' or 'synthetic'",
        code="engine_missing",
    )
