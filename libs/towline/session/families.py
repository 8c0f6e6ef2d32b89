"""Which tokens end a turn, by model family; and a rule for the models of no family that is known here.

A family is told by the special tokens of its template, never by the model's name. Each boundary proves itself on the
tokenizer at hand before a session uses it, a known family's too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from towline.session.boundary import Boundary
from towline.session.spelling import Tokenizer


@dataclass(frozen=True, slots=True)
class Family:
    """`marks`: tokens that all must be in the vocabulary; `ends`: those with which the policy may end its turn."""

    name: str
    marks: tuple[str, ...]
    ends: tuple[str, ...]


FAMILIES = (
    Family("llama", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    Family("qwen", ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>")),
    Family("chatml", ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",)),
    Family("mistral", ("[INST]", "[/INST]", "</s>"), ("</s>",)),
)
"""The first whose marks are all there is taken."""


def boundary_of(tokenizer: Tokenizer, stop_token_ids: Sequence[int] = (), variables: Mapping[str, Any] | None = None) -> Boundary:
    """The tokenizer's proven boundary. `stop_token_ids`: the model's own end-of-sequence tokens. `UsageError` where turns can't
    be put together safely."""
    for family in FAMILIES:
        if all(tokenizer.token_to_id(mark) is not None for mark in family.marks):
            known = [token for end in family.ends if (token := tokenizer.token_to_id(end)) is not None]
            found = Boundary(tokenizer, frozenset([*known, *stop_token_ids]), family.name, variables or {})
            break
    else:
        found = Boundary(tokenizer, frozenset(stop_token_ids), "generic", variables or {})
    found.prove()
    return found
