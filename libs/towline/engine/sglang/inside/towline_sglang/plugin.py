"""An SGLang plugin: a weight load that fails is answered with an error, and the server lives.

Without it an exception in a custom weight loader ends every process of the server. Plugins load before the engine does, so
nothing of SGLang's is imported until `register` is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"


def answer(original: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Around SGLang's update: (success, message), never an exception."""
    try:
        return original(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (whatever it is, it goes to the client as the answer)
        return False, f"{type(error).__name__}: {error}"


def register() -> None:
    """SGLang calls this once in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UPDATER, answer, HookType.AROUND)
    if os.environ.get("TOWLINE_SGLANG_CPU_DETERMINISTIC") == "1":
        from . import cpu_deterministic

        cpu_deterministic.allow()
