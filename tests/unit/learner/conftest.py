"""A tiny Qwen3 on disk, and batches for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from towline.config import Settings
from towline.learner.base import Row, TrainBatch, pack_rows

VOCABULARY = 17


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def settings_for(folder: Path, **trainer: Any) -> Settings:
    return Settings.model_validate(
        {
            "run": {"name": "unit", "steps": 10},
            "model": {"source": str(folder)},
            "prompts": {"source": "nowhere:prompts"},
            "sampling": {"max_tokens": 8},
            "reward": {"function": "nowhere:reward"},
            "trainer": {"learning_rate": 1e-2, **trainer},
        }
    )


def make_batch(seed: int, *, for_depth: int = 0, rows: int = 12, advantages: list[float] | None = None) -> TrainBatch:
    """Rows of different lengths and temperatures, some with environment tokens in the middle."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(rows):
        prompt, response = int(random.integers(1, 5)), int(random.integers(2, 7))
        mask = np.r_[np.zeros(prompt, np.uint8), np.ones(response, np.uint8)]
        if number % 3 == 0:
            mask[prompt + 1] = 0
        logprobs = np.where(mask == 1, -random.exponential(2.0, mask.size), np.nan).astype(np.float32)
        made.append(
            Row(
                group=number // 4,
                sample=number % 4,
                tokens=random.integers(0, VOCABULARY, mask.size).astype(np.int32),
                loss_mask=mask,
                logprobs=logprobs,
                versions=np.where(mask == 1, 0, -1).astype(np.int32),
                temperature=1.0 if number % 2 else 0.7,
                advantage=advantages[number] if advantages else float(random.normal()),
                staleness=0,
            )
        )
    return pack_rows(for_depth, made)
