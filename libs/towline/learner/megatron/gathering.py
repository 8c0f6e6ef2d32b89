"""A rank's tensors under their Hugging Face names: who publishes which, joined one at a time, and copies compared.

Owners are spread over the tensor and data parallel ranks of each pipeline stage by size, the same ones always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from towline.errors import InvariantError
from towline.learner.megatron.model import RankModel
from towline.learner.megatron.slots import Slot
from towline.learner.world import World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Gathering:
    """Of one rank. Every call is collective over the ranks of the stage."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._slots: dict[str, list[Slot]] = {}
        for slot in model.slots:
            if not slot.copied:
                self._slots.setdefault(slot.parameter, []).append(slot)
        self._owners = self._choose()

    def owned(self, value: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of each tensor that this rank owns.

        `value(name)` gives what to join for Megatron-Core's parameter `name`, shaped like the rank's; it's called once for each
        parameter on every rank, in the same order.
        """
        tp, tp_rank = self._model.tp, self._model.tp_rank
        data_rank = parallel_state.get_data_parallel_rank()
        for name, slots in sorted(self._slots.items()):
            part = value(name).detach()
            owner_data, owner_tp = divmod(self._owners[name], tp)
            if data_rank != owner_data:
                continue
            mine = owner_tp == tp_rank
            parts = [part]
            if tp > 1 and slots[0].dimension is not None:
                parts = [torch.empty_like(part) for _ in range(tp)] if mine else []
                group = parallel_state.get_tensor_model_parallel_group()
                dist.gather(part.contiguous(), parts or None, dst=dist.get_global_rank(group, owner_tp), group=group)
            if mine:
                for slot in slots:
                    yield slot.name, slot.join(parts)

    def _choose(self) -> dict[str, int]:
        """Parameter -> data rank x tp + tensor rank: to whoever has the least so far, the largest first."""
        tp = self._model.tp
        sizes = {
            name: self._model.parameters[name].numel() * (1 if slots[0].dimension is None else tp)
            for name, slots in self._slots.items()
        }
        load = [0] * (tp * parallel_state.get_data_parallel_world_size())
        owners: dict[str, int] = {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owners[name] = min(range(len(load)), key=lambda rank: (load[rank], rank))
            load[owners[name]] += sizes[name]
        return owners


def check_copies(model: RankModel, world: World) -> None:
    """`InvariantError` where ranks that must have the same weights don't: data parallel ones, norms, the tied embedding's two."""
    mine: dict[str, tuple[int, int]] = {}
    for slot in model.slots:
        place = "" if slot.dimension is None else f" part {model.tp_rank}"
        mine[f"{slot.name}{place}"] = _fingerprint(slot.view(model.parameters[slot.parameter]))
    seen: dict[str, tuple[int, tuple[int, int]]] = {}
    for rank, answer in enumerate(world.all_gather(msgspec.json.encode(mine))):
        for label, found in msgspec.json.decode(answer, type=dict[str, tuple[int, int]]).items():
            first, wanted = seen.setdefault(label, (rank, found))
            if found != wanted:
                raise InvariantError(
                    f"ranks {first} and {rank} have different weights of {label}; start again from the last checkpoint",
                    code="ranks_differ",
                )


def _fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the bits, the second weighted by place: equal tensors have equal ones. On the tensor's own device."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    places = torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)
    return int(bits.sum()), int((bits * places).sum())
