"""How the ranks of the torch backend hold one model: alone, a whole copy each (DDP), or a part of every tensor each (FSDP2).

Gradients are sums over the ranks in all three. Both wrappers average, so a rank's loss is scaled by the number of ranks first.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor

from towline.errors import InvariantError, UsageError
from towline.learner.torch_model import CausalModel
from towline.learner.world import World


class Alone:
    """One process. Also what the others are, where they don't say otherwise."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def loss_scale(self) -> float:
        """What a rank's loss is multiplied by, so that the ranks' gradients add up."""
        return 1.0

    def hold(self, model: CausalModel, *, trained: bool) -> None:
        """Lay the model out over the ranks; its parameters are what the optimiser gets afterwards."""

    @contextlib.contextmanager
    def accumulating(self, model: CausalModel, *, last: bool) -> Iterator[None]:
        """Around one micro batch's forward and backward pass; `last` of the optimiser step."""
        yield

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a parameter, or of its part of the optimiser's state. Collective."""
        return tensor

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This rank's part, laid out as `parameter` is, on its device."""
        return whole.to(parameter.device)

    def check_copies(self, tensors: Mapping[str, Tensor]) -> None:
        """`InvariantError` where ranks that hold the same tensor hold other bits. Collective."""


class Replicated(Alone):
    """DistributedDataParallel: a whole copy on each rank; gradients are reduced with the last micro batch."""

    @property
    def loss_scale(self) -> float:
        return float(self.world.size)

    def hold(self, model: CausalModel, *, trained: bool) -> None:
        if trained:
            from torch.nn.parallel import DistributedDataParallel

            # The same switch under two names, the older of which newer versions warn about.
            names = inspect.signature(DistributedDataParallel).parameters
            switch = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
            model.forward = DistributedDataParallel(model.module, **{switch: False})

    @contextlib.contextmanager
    def accumulating(self, model: CausalModel, *, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else model.forward.no_sync():
            yield

    def check_copies(self, tensors: Mapping[str, Tensor]) -> None:
        names = sorted(tensors)
        digests = [xxhash.xxh3_128_digest(_bytes(tensors[name])) for name in names]
        for rank, found in enumerate(self.world.all_gather(b"".join(digests))):
            for place, name in enumerate(names):
                if found[16 * place : 16 * place + 16] != digests[place]:
                    raise InvariantError(
                        f"rank {rank} and rank {self.world.rank} hold different copies of {name}: they must be equal after "
                        "every step; go on from the last checkpoint",
                        code="copies_differ",
                    )


class Sharded(Alone):
    """FSDP2 (`fully_shard`): each rank has its part of every tensor, and gathers one layer at a time."""

    def __init__(self, world: World, device: torch.device) -> None:
        super().__init__(world)
        from torch.distributed.device_mesh import init_device_mesh

        self._mesh = init_device_mesh(device.type, (world.size,))

    @property
    def loss_scale(self) -> float:
        return float(self.world.size)

    def hold(self, model: CausalModel, *, trained: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        # The root too gives its gathered tensors back after each forward pass: what a pass without a backward one left gathered
        # would be stale once the weights change.
        for part in (*layers_of(model.module), model.module):
            fully_shard(part, mesh=self._mesh, reshard_after_forward=True)

    def whole(self, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(parameter, DTensor):
            return whole.to(parameter.device)
        # Every rank has the whole tensor: no rank needs to send it.
        return distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def make_layout(kind: str, world: World, device: torch.device) -> Alone:
    """`kind` is trainer.parallel, which says something where there are several ranks."""
    if world.size == 1:
        return Alone(world)
    return Replicated(world) if kind == "ddp" else Sharded(world, device)


def recompute_layers(module: Any) -> None:
    """Keep each layer's inputs alone for the backward pass and compute the rest again there (Chen et al. 2016, arXiv:1604.06174).

    Not by `gradient_checkpointing_enable`, which works in training mode only, and there dropout is on.
    """
    from torch.utils.checkpoint import checkpoint

    for layer in layers_of(module):
        layer.forward = partial(_recomputed, checkpoint, layer.forward)


def _recomputed(checkpoint: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def layers_of(module: Any) -> list[Any]:
    """The model's blocks, by the class names that transformers keeps for splitting it; `UsageError` where it names none."""
    kinds = set(getattr(module, "_no_split_modules", None) or ())
    layers = [each for each in module.modules() if type(each).__name__ in kinds]
    if not layers:
        raise UsageError(
            f"{type(module).__name__} names no layers to split it by: trainer.recompute and trainer.parallel = 'fsdp' need them",
            code="model_layers",
        )
    return layers


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Name -> the rank that publishes it: about as many bytes on each, the same on every rank, and always the same."""
    loads = [0] * ranks
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        found[name] = rank
    return found


@contextlib.contextmanager
def rounded(parameters: Iterable[Tensor], dtype: torch.dtype) -> Iterator[None]:
    """Inside, the parameters are what a replica has of them: rounded to the publish dtype."""
    kept = []
    with torch.no_grad():
        for parameter in parameters:
            local = _local(parameter)
            if local.is_floating_point():
                kept.append((local, local.clone()))
                local.copy_(local.to(dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for local, value in kept:
                local.copy_(value)


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
