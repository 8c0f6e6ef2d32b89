"""Which of the complete groups go into the next batch, where there are more than it takes.

A policy is a function of one candidate that gives its sort key: the groups with the smallest keys are batched. It must depend
on the candidate alone, since a restarted buffer decides again. `buffer.policy` names one of this folder's or an import path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from towline.config import import_object
from towline.errors import UsageError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete group within the staleness bound."""

    number: int
    """Groups are numbered as they're admitted."""
    least_depth: int
    """Of the versions of its policy tokens."""
    rewards: tuple[float, ...]
    policy_tokens: int
    """Of all its samples."""
    reference: dict[str, Any]
    """What the prompt source gave for the verifier; empty for a group that a fork has opened again."""


Policy = Callable[[Candidate], Any]
"""Candidate -> a key that can be compared with the others'."""
NAMES = ("stalest_first", "fifo", "freshest_first", "priority")


def load_policy(name: str) -> Policy:
    """The policy of this name or import path; `UsageError` says which setting is wrong."""
    path = f"towline.buffer.policies.{name}:{name}" if name in NAMES else name
    if ":" not in path:
        raise UsageError(f"buffer.policy = {name!r}: use {', '.join(NAMES)}, or module:name of your own", code="policy")
    policy = import_object(path, "buffer.policy")
    if not callable(policy):
        raise UsageError(f"buffer.policy = {name!r} isn't callable", code="policy")
    found: Policy = policy
    return found
