"""A Megatron learner's checkpoint: fp32 masters and moments under Hugging Face names, each rank's own in files of its own.

Nothing in it depends on how the model was split, so any number of ranks in any layout may go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from towline.errors import CorruptError
from towline.learner.megatron.gathering import Gathering
from towline.learner.megatron.model import RankModel
from towline.learner.megatron.optimiser import MASTER, MOMENTS, Optimiser

LEARNER = "learner.json"
KIND, FORMAT = "megatron", 1
FIELDS = {"weights": MASTER, "exp_avg": MOMENTS[0], "exp_avg_sq": MOMENTS[1]}
"""A file's kind -> what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What isn't a tensor of the model."""

    step: int
    skipped_steps: int
    optimiser_steps: int
    random_state: Tensor
    """uint8[n] of the generator that orders the rows."""


def write(rank: int, gathering: Gathering, optimiser: Optimiser, progress: Progress) -> dict[str, bytes]:
    """This rank's files; rank 0 has what is common too."""
    files = {}
    for kind, field in FIELDS.items():
        tensors = dict(gathering.owned(lambda name, field=field: optimiser.read(name, field)))  # type: ignore[misc]
        files[f"{kind}-{rank:05d}.safetensors"] = save({name: t.cpu().contiguous() for name, t in sorted(tensors.items())})
    if rank == 0:
        meta = {
            "kind": KIND,
            "format": FORMAT,
            "step": progress.step,
            "skipped_steps": progress.skipped_steps,
            "optimiser_steps": progress.optimiser_steps,
            "random_state": bytes(progress.random_state.numpy().tobytes()).hex(),
        }
        files[LEARNER] = json.dumps(meta).encode()
    return files


def read(files: Mapping[str, bytes], model: RankModel, optimiser: Optimiser) -> Progress:
    """Set the model and the optimiser from every rank's files; one file, and one kind of tensor, is in memory at a time."""
    try:
        meta = json.loads(files[LEARNER])
        if meta.get("kind") != KIND or meta["format"] != FORMAT:
            raise CorruptError(
                f"learner checkpoint: kind {meta.get('kind', 'torch')!r}, format {meta['format']}; the megatron backend reads "
                f"{KIND} {FORMAT}: go on with the backend that wrote it",
                code="checkpoint",
            )
        optimiser.reset()
        for kind, field in FIELDS.items():
            _read_kind(files, kind, field, model, optimiser, bool(meta["optimiser_steps"]))
        optimiser.set_steps(int(meta["optimiser_steps"]))
        random_state = torch.frombuffer(bytearray(bytes.fromhex(meta["random_state"])), dtype=torch.uint8)
        return Progress(
            step=int(meta["step"]),
            skipped_steps=int(meta["skipped_steps"]),
            optimiser_steps=int(meta["optimiser_steps"]),
            random_state=random_state,
        )
    except (KeyError, ValueError, TypeError, SafetensorError) as error:
        raise CorruptError(f"learner checkpoint: {type(error).__name__}: {error}", code="checkpoint") from error


def _read_kind(
    files: Mapping[str, bytes], kind: str, field: str, model: RankModel, optimiser: Optimiser, has_moments: bool
) -> None:
    if field != MASTER and not has_moments:
        return
    buffers = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.parameters.items()}
    wanted = {(slot.name, slot.parameter) for slot in model.slots}
    for file in sorted(name for name in files if name.startswith(f"{kind}-")):
        tensors = load(files[file])
        for slot in model.slots:
            tensor = tensors.get(slot.name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != slot.shape:
                raise CorruptError(
                    f"learner checkpoint: {slot.name} is {list(tensor.shape)}, the model's is {list(slot.shape)}",
                    code="checkpoint",
                )
            part = tensor if slot.dimension is None else tensor.narrow(slot.dimension, *slot.part(model.tp_rank, model.tp))
            slot.write(buffers[slot.parameter], part.float(), model.tp_rank, model.tp)
            wanted.discard((slot.name, slot.parameter))
    if wanted:
        raise CorruptError(f"learner checkpoint: no {kind} of {min(wanted)[0]}; another model's?", code="checkpoint")
    for name, buffer in buffers.items():
        optimiser.write(name, field, buffer)
