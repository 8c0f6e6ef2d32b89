"""Small models of the kinds that the Megatron backend does, with every weight away from its trivial value."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCABULARY = 17
"""Odd: the tensor parallel ranks' parts of the vocabulary aren't equal."""


def make_model(folder: Path, kind: str, *, tied: bool) -> Path:
    """Two layers, four heads, two key-value heads, in fp32; written into `folder`."""
    config_class, model_class = KINDS[kind]
    torch.manual_seed(3)
    model = model_class(
        config_class(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8 if kind == "qwen3" else 4,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
