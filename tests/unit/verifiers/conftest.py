"""A sample with the text one asks for: one token a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from towline.contract.task import PromptRef
from towline.verifiers.base import Sample


class Characters:
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(token) for token in token_ids)


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    def make(
        text: str, *, finish: str = "stop", sample: int = 0, prompt: str = "?", mask: list[int] | None = None, **reference: Any
    ) -> Sample:
        return Sample(
            prompt_tokens=np.array([ord(c) for c in prompt], np.int32),
            response_tokens=np.array([ord(c) for c in text], np.int32),
            policy_mask=np.array(mask or [1] * len(text), np.uint8),
            finish=finish,  # type: ignore[arg-type]
            reference=reference,
            prompt_ref=PromptRef("test", 0, 0),
            tokenizer=Characters(),
            group=1,
            sample=sample,
        )

    return make
