"""What a rollout worker is asked to do, and how it samples."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from towline.contract.arrays import Array, pack, unpack

TRAIN, EVAL, SESSION = "train", "eval", "session"
"""Lanes: for workers; for workers that serve one version; for the gateways' clients, who claim its tasks."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. `temperature` 0 means greedy; `top_k` 0 and `top_p` 1 mean off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


class PromptRef(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt came from: source, pass over the source, row."""

    source: str
    epoch: int
    index: int


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """A prompt source's position after the prompt: the next one to be drawn is (epoch, position)."""

    epoch: int
    position: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate. Its place in CONTROL is the sample's admission; that sequence is its `task_sequence`."""

    run: str
    lane: str
    group: int
    sample: int
    group_size: int
    prompt: Array
    """int32[P] token IDs."""
    prompt_ref: PromptRef
    cursor: Cursor
    reference: dict[str, Any] = {}
    """What the verifier needs and the policy must not see."""
    environment: str = "single-turn"
    sampling: SamplingParams
    seed: int
    not_before_depth: int
    """Only a version of the newest lineage with at least this depth may serve it."""
    exact_version: int | None = None
    """Lane eval: only this version may serve it."""
    attempt: int = 0
    admitted_at: float
    deadline: float
    """Unix seconds, as is `admitted_at`."""
    site: str | msgspec.UnsetType = msgspec.UNSET
    """The site whose workers alone get it, in a lane of its own; absent: home's workers."""

    @property
    def issued_to(self) -> str:
        """`site`, "" for home."""
        return self.site or ""

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int32]:
        return unpack(self.prompt, "<i4", "prompt")  # type: ignore[return-value]


def pack_tokens(tokens: npt.ArrayLike) -> Array:
    """Token IDs as an int32 array of a message."""
    return pack(np.asarray(tokens, np.int32).reshape(-1), "<i4")


Cut = Literal["start", "retract", "in_place"]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a trajectory were sampled by `version`. `cut` says how the span began: `in_place` tokens
    were sampled on the previous version's KV cache, `retract` ones on a recomputed one."""

    start: int
    end: int
    version: int
    cut: Cut
