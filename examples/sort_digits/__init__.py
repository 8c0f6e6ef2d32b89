"""The demo's task: sort five digits. "52918>" must be answered "12589" and then the end of sequence.

This package lies beside demo.toml, as a run's own code does, and is named there by import path. Only `build_model` needs
torch, so the services that draw prompts or score samples start without it.
"""

from __future__ import annotations

from pathlib import Path

from sort_digits.task import eval_prompts, reward, train_prompts

__all__ = ["build_model", "eval_prompts", "reward", "train_prompts"]


def build_model(folder: Path, seed: int, **arguments: int) -> str:
    """Write the model before its first RL step into `folder`; a line that says how it came about."""
    from sort_digits.model import build

    return build(folder, seed, **arguments)
