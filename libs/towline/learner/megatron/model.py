"""One rank's part of the policy as Megatron-Core runs it: built, and computed over micro batches through the pipeline."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from safetensors import safe_open
from torch import Tensor

from towline.config import TrainerSettings
from towline.errors import InvariantError, UsageError
from towline.learner.megatron.architecture import Architecture
from towline.learner.megatron.batches import MicroBatch
from towline.learner.megatron.slots import Slot, slots_of
from towline.learner.torch_model import safetensors_files
from towline.learner.world import World

LossOf = Callable[[Tensor, MicroBatch], Tensor]
"""f32[N, v] logits of the policy tokens (this rank's columns, temperature applied) -> the micro batch's loss."""


def start_parallel(trainer: TrainerSettings, world: World, seed: int) -> None:
    """Megatron-Core's groups for this world. `UsageError` where the settings are of another number of ranks."""
    if world.size != trainer.ranks:
        raise UsageError(
            f"trainer.dp x tp x pp is {trainer.ranks}, and {world.size} ranks were started; start as many with torchrun",
            code="parallel",
        )
    _check_device(trainer.device)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if trainer.device.startswith("cuda") else "gloo", store=dist.HashStore(), rank=0, world_size=1
        )
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    cuda = torch.cuda.is_available()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        create_gloo_process_groups=cuda,
        distributed_timeout_minutes=math.ceil(world.timeout_seconds / 60),
    )
    # Without CUDA a tracker that forks nothing: exact, since there is no dropout.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not cuda, force_reset_rng=True)


def _check_device(device: str) -> None:
    """Megatron-Core takes CUDA wherever there is some."""
    if torch.cuda.is_available() and not device.startswith("cuda"):
        way_out = "there are GPUs: set trainer.device = 'cuda', or hide them with CUDA_VISIBLE_DEVICES= in the environment"
        raise UsageError(f"trainer.device = {device!r} with the megatron backend, and {way_out}", code="device")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"trainer.device = {device!r}: no GPU was found; set trainer.device = 'cpu'", code="device")


class _Norm(torch.nn.RMSNorm):  # type: ignore[misc]  # torch isn't typed here
    """RMSNorm whose gradient Megatron-Core sums over the tensor parallel ranks, as sequence parallelism needs."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def _layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = _Norm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = _Norm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=_Norm)


class RankModel:
    """This rank's layers of the policy, and where the whole model's tensors lie in them."""

    def __init__(self, architecture: Architecture, config: TransformerConfig, device: torch.device) -> None:
        self.architecture = architecture
        self.config = config
        self.device = device
        self.tp, self.tp_rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        self.first = parallel_state.is_pipeline_first_stage()
        self.last = parallel_state.is_pipeline_last_stage()
        padded = -(-architecture.vocabulary // self.tp) * self.tp
        inner = GPTModel(
            config=config,
            transformer_layer_spec=_layers(config),
            vocab_size=padded,
            max_sequence_length=architecture.positions,
            pre_process=self.first,
            post_process=self.last,
            parallel_output=True,
            share_embeddings_and_output_weights=architecture.tied,
            position_embedding_type="rope",
            rotary_percent=1.0,
            rotary_base=architecture.rope_base,
            rope_scaling=architecture.rope_scaling is not None,
            rope_scaling_factor=architecture.rope_scaling or 1.0,
        ).to(device)
        self.parameters: dict[str, Any] = dict(inner.named_parameters())
        """Megatron-Core's name -> parameter of this rank."""
        self.module: Any = Float16Module(config, inner) if config.bf16 else inner
        first_layer = inner.decoder.layers[0].layer_number - 1
        self.slots: list[Slot] = list(slots_of(architecture, list(self.parameters), first_layer, self.tp))

    def load(self, folder: Path) -> None:
        """The weights of a Hugging Face folder: only this rank's part of each tensor is read."""
        files = {name: path for path in safetensors_files(folder) for name in _names(path)}
        with torch.no_grad():
            for slot in self.slots:
                if slot.name not in files:
                    raise UsageError(
                        f"model {folder}: no tensor {slot.name}; is config.json of these weights?", code="model_load"
                    )
                with safe_open(files[slot.name], "pt") as file:
                    found = file.get_slice(slot.name)
                    if tuple(found.get_shape()) != slot.shape:
                        raise UsageError(
                            f"model {folder}: {slot.name} is {found.get_shape()}, config.json says {list(slot.shape)}",
                            code="model_load",
                        )
                    part = _part(found, slot, self.tp_rank, self.tp)
                slot.write(self.parameters[slot.parameter], part.to(self.config.params_dtype), self.tp_rank, self.tp)
        unknown = sorted(files.keys() - self._known())
        if unknown:
            raise UsageError(f"model {folder}: tensor {unknown[0]} has no place in the megatron backend", code="model_load")

    def _known(self) -> set[str]:
        """Every tensor that some rank has: of any layer what this rank's layers have."""
        a = self.architecture
        names = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"}
        names |= set() if a.tied else {"output_layer.weight"}
        layer = {name.split(".", 3)[3] for name in self.parameters if name.startswith("decoder.layers.")}
        names |= {f"decoder.layers.{number}.{rest}" for number in range(a.layers) for rest in layer}
        return {slot.name for slot in slots_of(a, sorted(names), 0, self.tp)}

    def run(self, model: Any, micros: Sequence[MicroBatch], loss_of: LossOf, *, train: bool) -> None:
        """Forward, and with `train` backward, of the micro batches; `loss_of` is called on the last stage, in their order.

        `model` is `module`, or what wraps it. At least one micro batch.
        """
        if not micros:
            raise InvariantError("a pass needs a micro batch; give an empty one", code="micro_batch")
        step = functools.partial(_forward_step, loss_of)
        with torch.set_grad_enabled(train):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(micros),
                model=[model],
                num_microbatches=len(micros),
                seq_length=micros[0].inputs.shape[1],
                micro_batch_size=micros[0].inputs.shape[0],
                forward_only=not train,
            )


def _forward_step(loss_of: LossOf, micros: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    micro = next(micros)
    length = micro.inputs.shape[1]
    places = torch.arange(length, device=micro.inputs.device)
    mask = (places[None, :] > places[:, None])[None, None]
    output = model(micro.inputs, places[None].expand_as(micro.inputs), mask)

    def loss(logits: Tensor) -> Any:
        chosen = logits[micro.positions].float() / micro.temperatures[:, None]
        found = loss_of(chosen, micro)
        if found.requires_grad and not micro.targets.numel():
            found = found + 0.0 * logits.sum()
        return found, torch.tensor(0, dtype=torch.int), {}

    return output, loss


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _part(found: Any, slot: Slot, rank: int, size: int) -> Tensor:
    if slot.dimension is None:
        return found[:]
    start, length = slot.part(rank, size)
    return found[start : start + length] if slot.dimension == 0 else found[:, start : start + length]


def parameter_names(parameters: Mapping[str, Any]) -> list[str]:
    """In one order on all ranks of a stage."""
    return sorted(parameters)
