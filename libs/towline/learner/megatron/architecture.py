"""A Hugging Face configuration as Megatron-Core's, for Llama, Qwen2 and Qwen3 dense models; anything else is refused by name."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer import TransformerConfig

from towline.config import TrainerSettings
from towline.errors import UsageError

MODEL_TYPES = ("llama", "qwen2", "qwen3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron-Core knows Llama 3's scaling with these alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the model is, under Hugging Face's names."""

    model_type: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    head: int
    """Elements of one head."""
    norm_epsilon: float
    tied: bool
    positions: int
    rope_base: float
    rope_scaling: float | None
    """Llama 3's factor, None without scaling."""
    qkv_bias: bool
    qk_norm: bool

    @property
    def queries(self) -> int:
        """Query heads of one key-value head."""
        return self.heads // self.key_value_heads


def read_architecture(folder: Path) -> Architecture:
    """The folder's config.json; `UsageError` names what the Megatron backend doesn't do."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return _read(folder, config)
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"model {folder}: config.json can't be read: {error}", code="model_load") from error
    except (KeyError, TypeError) as error:
        raise UsageError(f"model {folder}: config.json lacks {error}", code="model_load") from error


def _read(folder: Path, config: dict[str, Any]) -> Architecture:
    kind = config["model_type"]
    if kind not in MODEL_TYPES:
        _refuse(folder, f"model_type {kind!r}", f"use one of {', '.join(MODEL_TYPES)}")
    if config.get("hidden_act", "silu") != "silu":
        _refuse(folder, f"hidden_act {config['hidden_act']!r}", "silu is needed")
    if kind == "llama" and (config.get("attention_bias") or config.get("mlp_bias")):
        _refuse(folder, "biases in a Llama", "attention_bias and mlp_bias must be false")
    if kind == "qwen3" and config.get("attention_bias"):
        _refuse(folder, "attention_bias in a Qwen3", "it must be false")
    if config.get("use_sliding_window"):
        _refuse(folder, "sliding windows", "use_sliding_window must be false")
    heads = int(config["num_attention_heads"])
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return Architecture(
        model_type=kind,
        vocabulary=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        key_value_heads=int(config.get("num_key_value_heads") or heads),
        head=int(config.get("head_dim") or config["hidden_size"] // heads),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        positions=int(config["max_position_embeddings"]),
        rope_base=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        rope_scaling=_scaling(folder, rope),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def _scaling(folder: Path, rope: dict[str, Any]) -> float | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3" or any(float(rope.get(name, value)) != value for name, value in _LLAMA3.items()):
        _refuse(folder, f"rope {rope}", f"default, or llama3 with {_LLAMA3}")
    return float(rope["factor"])


def _refuse(folder: Path, what: str, way_out: str) -> None:
    raise UsageError(
        f"model {folder}: the megatron backend doesn't do {what}; {way_out}, or trainer.backend = 'torch'", code="model"
    )


def check_parallel(architecture: Architecture, trainer: TrainerSettings) -> None:
    """`UsageError` where the model can't be split like that."""
    for name, count in (("attention heads", architecture.heads), ("key-value heads", architecture.key_value_heads),
                        ("MLP columns", architecture.intermediate)):  # fmt: skip
        if count % trainer.tp:
            raise UsageError(
                f"trainer.tp = {trainer.tp} doesn't divide the model's {count} {name}; choose another", code="parallel"
            )
    if architecture.layers % trainer.pp:
        raise UsageError(
            f"trainer.pp = {trainer.pp} doesn't divide the model's {architecture.layers} layers; choose another", code="parallel"
        )


def transformer_config(architecture: Architecture, trainer: TrainerSettings) -> TransformerConfig:
    """Megatron-Core's configuration. Fused kernels are off: they need CUDA, Apex or Transformer Engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults of its own
        return TransformerConfig(**_arguments(architecture, trainer))


def _arguments(architecture: Architecture, trainer: TrainerSettings) -> dict[str, Any]:
    dtype = DTYPES[trainer.dtype]
    recompute: dict[str, Any] = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if trainer.recompute else {}
    )
    return dict(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.intermediate,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.key_value_heads,
        kv_channels=architecture.head,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        sequence_parallel=trainer.sequence_parallel,
        variable_seq_lengths=trainer.pp > 1,
        moe_token_dispatcher_type="alltoall",  # of no use to dense models; the default refuses variable lengths
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        # The loss weighs tokens by itself and is summed over ranks: nothing is averaged by Megatron-Core.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        **recompute,
    )
