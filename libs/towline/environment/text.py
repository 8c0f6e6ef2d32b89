"""Text in and out of token IDs for environments. Only an environment's own words are ever encoded: what the policy sampled stays
the IDs that it sampled, and is decoded to be read alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towline.errors import UsageError


def encode(tokenizer: Any, text: str) -> list[int]:
    """The text's tokens without any that a tokenizer would put around it; for Hugging Face's two kinds of tokenizers."""
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(encoded, "ids", encoded))


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The tokens' text, special ones left out."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def token_id(tokenizer: Any, token: str) -> int:
    """Of a token that stands for itself; `UsageError` where the tokenizer has no such token."""
    look_up = getattr(tokenizer, "token_to_id", None) or tokenizer.convert_tokens_to_ids
    found = look_up(token)
    if found is None or encode(tokenizer, token) != [found]:
        raise UsageError(
            f"the tokenizer has no token {token!r} of its own; name one that it has in prompts.environment_arguments",
            code="token_missing",
        )
    return int(found)
