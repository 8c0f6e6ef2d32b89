"""A branch of a session as the arrays of a trajectory: exactly what the engine saw and sampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from towline.contract.task import VersionSpan
from towline.contract.trajectory import FinishReason, Segment
from towline.errors import ConflictError
from towline.session.tree import Session


@dataclass(frozen=True, slots=True)
class Branch:
    """T tokens; arrays are T long, `spans` cover the policy tokens, as `contract.trajectory.Trajectory` wants them."""

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    """NaN where loss_mask is 0."""
    spans: tuple[VersionSpan, ...]
    segments: tuple[Segment, ...]
    finish: FinishReason


def branch(session: Session, node: int | None = None) -> Branch:
    """From the root to `node` (None: the head, or the policy's last turn before it). `ConflictError` where the policy has
    said nothing on it."""
    path = session.path(node)
    while path and session.nodes[path[-1]].kind != "policy":
        path.pop()  # what was asked last wasn't answered: nothing of it is the policy's
    if not path:
        raise ConflictError("the session has no turn of the policy: there is nothing to finish", code="session_empty")
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    segments: list[Segment] = []
    for number in path:
        found = session.nodes[number]
        start = len(tokens)
        tokens += found.tokens
        policy = found.kind == "policy"
        logprobs += found.logprobs if policy else [np.nan] * len(found.tokens)
        if found.tokens:
            segments.append(Segment(start, len(tokens), found.kind))
        for span in found.spans:
            # A turn begins on a prefix that is computed under its own version: nothing of an older one's cache is left.
            spans.append(VersionSpan(start + span.start, start + span.end, span.version, span.cut))
    mask = np.isfinite(np.asarray(logprobs, np.float32)).astype(np.uint8)
    return Branch(
        tokens=np.asarray(tokens, np.int32),
        loss_mask=mask,
        logprobs=np.asarray(logprobs, np.float32),
        spans=tuple(spans),
        segments=tuple(segments),
        finish=session.nodes[path[-1]].finish or "stop",
    )
