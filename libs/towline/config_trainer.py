"""The settings by which versions are made and published: [trainer] and [publisher]."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from towline.config_loading import STRICT, Count, Positive


class _Section(BaseModel):
    model_config = STRICT


class TrainerSettings(_Section):
    backend: Literal["torch", "megatron"] = "torch"
    device: str = "cpu"
    """cpu, or cuda: the GPU of each rank's number on its machine."""
    threads: Count = 1
    """Of each rank."""
    dp: Count = 1
    """Data parallel ranks: each computes on its part of a batch's rows. A trainer is dp x tp x pp processes."""
    tp: Count = 1
    """Tensor parallel ranks (megatron): each has a part of every matrix."""
    pp: Count = 1
    """Pipeline parallel ranks (megatron): each has some of the layers."""
    sequence_parallel: bool = False
    """With tp: activations between the matrices are split along the sequence (megatron)."""
    distributed_optimizer: bool = False
    """With dp: each rank has a part of the optimiser's state (megatron)."""
    rank_timeout_seconds: Positive = 1800.0
    """How long a rank waits for one that hangs, or that fetches or uploads more than it does. One that dies is seen at once."""
    recompute: bool = False
    """Activations are computed again in the backward pass instead of being kept."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; with bfloat16 the optimiser has fp32 masters."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How the dp ranks of the backend torch hold the model: whole on each, or (FSDP2) a part of every tensor on each."""
    packing: bool = False
    """Rows lie end to end in a micro batch, without padding between them (torch). For models of transformers whose attention
    keeps such rows apart, which is checked at the start."""
    loss: str = "grpo"
    loss_arguments: dict[str, Any] = {}
    advantage: str = "group_normalised"
    correction: str = "none"
    correction_arguments: dict[str, Any] = {}
    learning_rate: Positive = 1e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_learning_rate_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Linear decay to this share of learning_rate at the last step."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_gradient_norm: Positive = 1.0
    minibatches: Count = 1
    """Optimiser steps on one batch."""
    micro_batch_tokens: Count = 65_536
    """Positions in one forward pass, padding included."""
    checkpoint_every: Count = 20
    """Versions between checkpoints."""
    mode: Literal["auto", "sync", "async"] = "auto"
    """sync waits for each version's commit before the next step; auto: sync where max_staleness is 0."""
    delta_mode: str = "default"

    @property
    def ranks(self) -> int:
        """Processes that compute one step together."""
        return self.dp * self.tp * self.pp

    def alone(self) -> TrainerSettings:
        """The same for one process, as a replay is."""
        return self.model_copy(update={"dp": 1, "tp": 1, "pp": 1, "sequence_parallel": False, "distributed_optimizer": False})

    @model_validator(mode="after")
    def _parallel(self) -> TrainerSettings:
        if self.backend != "megatron" and (self.tp > 1 or self.pp > 1):
            raise ValueError("tp and pp need backend = 'megatron'")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp > 1")
        return self


class PublisherSettings(_Section):
    verify: Literal["reapply", "sender"] = "reapply"
    probe_tolerance: Positive = 1e-3
    poll_seconds: Positive = 0.5
    anchor_every: Count = 50
    """Versions between anchors."""
