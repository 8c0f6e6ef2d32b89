"""Dead letters as people read them: where from, why, and what can be made out of the message."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from towline.bus.client import Message
from towline.contract.codec import plain
from towline.contract.control import decode_control
from towline.contract.outcome import decode_outcome
from towline.contract.policy import decode_policy
from towline.contract.requests import STAGE
from towline.contract.trajectory import decode_trajectory
from towline.errors import MalformedError

_BYTES_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """`at` in Unix seconds; `context` is what the sender knew besides."""

    sequence: int
    stage: str
    at: float
    nbytes: int
    reason: str
    context: dict[str, Any]


def letter_of(message: Message, relative: Callable[[str], str]) -> Letter | None:
    """None for a request, which stands in the same stream."""
    stage = relative(message.subject).partition(".")[2]
    if stage.startswith(f"{STAGE}."):
        return None
    return Letter(
        sequence=message.sequence, stage=stage, at=message.at, nbytes=len(message.data),
        reason=message.headers.get("Towline-Reason", ""), context=context_of(message),
    )  # fmt: skip


def context_of(message: Message) -> dict[str, Any]:
    text = message.headers.get("Towline-Context", "{}")
    try:
        found = json.loads(text)
    except ValueError:
        return {"cut": text}  # a header has a length limit
    return found if isinstance(found, dict) else {"context": found}


def content_of(data: bytes) -> Any:
    """The message's fields, as far as it is one that can be read; else its first bytes."""
    with contextlib.suppress(MalformedError):
        found = decode_trajectory(data)
        return {"group": found.group, "sample": found.sample, "tokens": found.tokens.tolist(), "reference": found.reference}
    for decode in (decode_outcome, decode_control, decode_policy):
        with contextlib.suppress(MalformedError):
            return plain(decode(data))
    return {"unreadable": data[:_BYTES_SHOWN].hex()}
