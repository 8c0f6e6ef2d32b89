"""Where each Hugging Face tensor lies in Megatron-Core's parameters: one table for loading, publishing and checkpoints.

Megatron-Core fuses q, k and v (by key-value head: its queries, its key, its value) and gate with up, and splits what it fuses
over the tensor parallel ranks. A slot is one Hugging Face tensor's place in one fused parameter of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from towline.learner.megatron.architecture import Architecture

View = Callable[[Tensor], Tensor]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class Slot:
    """A Hugging Face tensor, whole of `shape`, split along `dimension` (None: every tensor parallel rank has all of it)."""

    name: str
    parameter: str
    """Megatron-Core's name, as it stands in this rank's model."""
    shape: tuple[int, ...]
    dimension: int | None
    view: View
    """The part of the rank's parameter that is this tensor's, writable; its elements in the order of the tensor's own part."""
    copied: bool = False
    """A second copy of a tensor that another pipeline stage publishes (the tied embedding on the last one)."""

    def part(self, rank: int, size: int) -> tuple[int, int]:
        """(start, length) of the rank's part along `dimension`. The last ranks have less where it isn't divisible (padding)."""
        if self.dimension is None:
            raise ValueError(f"{self.name} isn't split")
        width = -(-self.shape[self.dimension] // size)
        start = min(rank * width, self.shape[self.dimension])
        return start, min(width, self.shape[self.dimension] - start)

    def part_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """The shape of the rank's part."""
        if self.dimension is None:
            return self.shape
        _, length = self.part(rank, size)
        return (*self.shape[: self.dimension], length, *self.shape[self.dimension + 1 :])

    def write(self, parameter: Tensor, part: Tensor, rank: int, size: int) -> None:
        """Put the tensor's part into the rank's parameter; what is padding becomes 0."""
        target = self.view(parameter)
        if target.numel() == part.numel():
            target.copy_(part.reshape(target.shape))
            return
        target.zero_()
        target[: part.shape[0]].copy_(part)

    def read(self, parameter: Tensor, rank: int, size: int) -> Tensor:
        """The tensor's part in the rank's parameter, without padding."""
        shape = self.part_shape(rank, size)
        found = self.view(parameter)
        if found.numel() != torch.Size(shape).numel():
            found = found[: shape[0]]
        return found.reshape(shape)

    def join(self, parameters: Sequence[Tensor]) -> Tensor:
        """The whole tensor of every tensor parallel rank's parameter."""
        if self.dimension is None:
            return self.read(parameters[0], 0, 1)
        parts = [self.read(parameter, rank, len(parameters)) for rank, parameter in enumerate(parameters)]
        return torch.cat(parts, self.dimension)


def slots_of(architecture: Architecture, parameters: Sequence[str], first_layer: int, tp: int) -> Iterator[Slot]:
    """The slots of these parameters; layer 0 of this rank's model is the whole model's `first_layer`."""
    for parameter in parameters:
        if parameter.startswith("decoder.layers."):
            number, _, rest = parameter.removeprefix("decoder.layers.").partition(".")
            yield from _layer_slots(architecture, parameter, f"model.layers.{first_layer + int(number)}", rest, tp)
        else:
            yield _outer_slot(architecture, parameter)


def _outer_slot(a: Architecture, parameter: str) -> Slot:
    table = (a.vocabulary, a.hidden)
    if parameter == "embedding.word_embeddings.weight":
        return Slot(EMBEDDING, parameter, table, 0, _whole)
    if parameter == "output_layer.weight":
        return Slot(EMBEDDING if a.tied else HEAD, parameter, table, 0, _whole, copied=a.tied)
    if parameter == "decoder.final_layernorm.weight":
        return Slot(NORM, parameter, (a.hidden,), None, _whole)
    raise KeyError(f"parameter {parameter} has no Hugging Face name")


def _layer_slots(a: Architecture, parameter: str, layer: str, rest: str, tp: int) -> Iterator[Slot]:
    plain: dict[str, tuple[str, tuple[int, ...], int | None]] = {
        "input_layernorm.weight": ("input_layernorm.weight", (a.hidden,), None),
        "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", (a.hidden,), None),
        "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", (a.head,), None),
        "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", (a.head,), None),
        "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", (a.hidden, a.heads * a.head), 1),
        "mlp.linear_fc2.weight": ("mlp.down_proj.weight", (a.hidden, a.intermediate), 1),
    }
    if rest in plain:
        name, shape, dimension = plain[rest]
        yield Slot(f"{layer}.{name}", parameter, shape, dimension, _whole)
    elif rest.startswith("self_attention.linear_qkv."):
        kind = rest.removeprefix("self_attention.linear_qkv.")
        width = (a.hidden,) if kind == "weight" else ()
        places = {
            "q": (0, a.queries, a.heads),
            "k": (a.queries, 1, a.key_value_heads),
            "v": (a.queries + 1, 1, a.key_value_heads),
        }
        for letter, (first, count, heads) in places.items():
            view = _heads(a.key_value_heads // tp, a.queries + 2, a.head, first, count)
            yield Slot(f"{layer}.self_attn.{letter}_proj.{kind}", parameter, (heads * a.head, *width), 0, view)
    elif rest == "mlp.linear_fc1.weight":
        for half, letter in enumerate(("gate", "up")):
            yield Slot(f"{layer}.mlp.{letter}_proj.weight", parameter, (a.intermediate, a.hidden), 0, _half(half))
    else:
        raise KeyError(f"parameter {parameter} has no Hugging Face name")


def _whole(parameter: Tensor) -> Any:
    return parameter


def _heads(groups: int, each: int, head: int, first: int, count: int) -> View:
    def view(parameter: Tensor) -> Any:
        return parameter.view(groups, each, head, *parameter.shape[1:])[:, first : first + count]

    return view


def _half(half: int) -> View:
    def view(parameter: Tensor) -> Any:
        return parameter.chunk(2, 0)[half]

    return view
