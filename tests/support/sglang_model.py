"""A small Qwen3 with fused projections in SGLang, its weights far enough from uniform to tell policies apart, and an oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from towline.delta.files import load_folder, save_folder
from towline.delta.state import ModelState, RawTensor

VOCABULARY = 512


def build(folder: Path, seed: int, vocabulary: int = VOCABULARY, kv_heads: int = 2) -> None:
    """float32, untied, grouped-query attention."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.08)
    model.float().save_pretrained(folder)


def changed(state: ModelState, seed: int, share: float = 0.05) -> tuple[ModelState, set[str]]:
    """The state with a share of each projection's elements moved, and the names of those tensors."""
    random = np.random.default_rng(seed)
    out, names = dict(state), {name for name in state if "proj" in name or "lm_head" in name}
    for name in names:
        values = state[name].data.view(np.float32).copy()
        at = random.choice(values.size, int(values.size * share), replace=False)
        values[at] += random.normal(0, 0.1, at.size).astype(np.float32)
        out[name] = RawTensor(state[name].spec, values.view(np.uint8))
    return out, names


def oracle(folder: Path, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """transformers' logprobs of tokens[1:], float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float() / temperature, -1)
    return [float(row[token]) for row, token in zip(scores, tokens[1:], strict=True)]


def folder_of(base: Path, state: ModelState, folder: Path) -> Path:
    """A version as the Hugging Face folder that the oracle reads; written by the delta store's code, not by the engine's."""
    save_folder(state, folder)
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    return folder


def weights(folder: Path) -> ModelState:
    return load_folder(folder)
