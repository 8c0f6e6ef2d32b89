"""An SGLang plugin: a weight load that fails is answered with an error, and every answer of a stream has its version spans.

Without it an exception in a custom weight loader ends every process of the server, and only a stream's last answer says
which weights its tokens were sampled from. Plugins load before the engine does, so nothing of SGLang's is imported until
`register` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_STREAMS = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"


def answer(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Around SGLang's update: (success, message), never an exception."""
    try:
        return original(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (whatever it is, it goes to the client as the answer)
        return False, f"{type(error).__name__}: {error}"


def divide(result: None, accumulator: Any, *, req: Any) -> None:
    """After SGLang took a request's new tokens for its next answer: the spans of a request that hasn't ended yet too."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    spans = accumulator.weight_versions
    if spans and spans[-1] is None and accumulator.output_reqs[-1] is req:
        spans[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )


def register() -> None:
    """SGLang calls this once in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UPDATER, answer, HookType.AROUND)
    HookRegistry.register(_STREAMS, divide, HookType.AFTER)
    if os.environ.get("TOWLINE_SGLANG_CPU_DETERMINISTIC") == "1":
        from . import cpu_deterministic

        cpu_deterministic.allow()
