"""Tiny models with random weights, as folders and as published states, and plain forwards of them as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from towline.delta.state import ModelState, RawTensor, TensorSpec, model_digest, tensor_digests

VOCABULARY = 61
Family = Literal["qwen3-tied", "llama"]
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


def make_model(family: Family, seed: int, dtype: torch.dtype = torch.bfloat16, context: int = 512) -> Any:
    """A causal LM in float32 whose weights `dtype` can hold."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": context,
        "initializer_range": 0.2,
    }  # fmt: skip
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**common, tie_word_embeddings=False))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, tie_word_embeddings=True))
    # Parameters alone: a module's cast would round the rotary frequencies too, which no checkpoint holds.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model.eval()


def save(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """The model as a Hugging Face folder of `dtype`."""
    copy = type(model)(model.config).to(dtype)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(folder)
    return folder


def state_of(model: Any, dtype: torch.dtype = torch.bfloat16) -> ModelState:
    """The published state, without the second name of a tied tensor."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            value = tensor.to(dtype).contiguous()
            data = np.frombuffer(bytes(value.reshape(-1).view(torch.uint8).numpy()), np.uint8)
            state[name] = RawTensor(TensorSpec(name, _NAMES[dtype], tuple(value.shape)), data)
    return state


def digest_of(state: ModelState) -> str:
    return model_digest(tensor_digests(state))


@torch.no_grad()
def plain_logprobs(model: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Of tokens[1:], from one forward pass without a cache."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[1:, None])[:, 0].tolist()  # type: ignore[no-any-return]
