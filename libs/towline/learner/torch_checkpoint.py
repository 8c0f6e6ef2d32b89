"""A torch learner's checkpoint as bytes: two safetensors files and one JSON file, nothing that could run code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from towline.errors import CorruptError

WEIGHTS, OPTIMISER, TRAINER = "weights.safetensors", "optimiser.safetensors", "learner.json"
FORMAT = 1
_RANDOM = "random_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCheckpoint:
    """`weights` are the fp32 masters by parameter name; `optimiser` maps "FIELD/PARAMETER" to AdamW's tensors."""

    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    random_state: Tensor
    """uint8[n] of the generator that orders the rows."""
    step: int
    skipped_steps: int


def write(checkpoint: LearnerCheckpoint) -> dict[str, bytes]:
    """The files. Equal checkpoints give equal bytes."""
    meta = {"format": FORMAT, "step": checkpoint.step, "skipped_steps": checkpoint.skipped_steps}
    return {
        WEIGHTS: save(_plain(checkpoint.weights)),
        OPTIMISER: save(_plain({**checkpoint.optimiser, _RANDOM: checkpoint.random_state})),
        TRAINER: json.dumps(meta).encode(),
    }


def read(files: Mapping[str, bytes]) -> LearnerCheckpoint:
    """The checkpoint; `CorruptError` where a file is missing or isn't one."""
    try:
        meta = json.loads(files[TRAINER])
        if meta["format"] != FORMAT:
            raise CorruptError(f"learner checkpoint: format {meta['format']}, this learner knows {FORMAT}", code="checkpoint")
        optimiser = load(files[OPTIMISER])
        return LearnerCheckpoint(
            weights=load(files[WEIGHTS]),
            random_state=optimiser.pop(_RANDOM),
            optimiser=optimiser,
            step=int(meta["step"]),
            skipped_steps=int(meta["skipped_steps"]),
        )
    except (KeyError, ValueError, TypeError, SafetensorError) as error:
        raise CorruptError(f"learner checkpoint: {type(error).__name__}: {error}", code="checkpoint") from error


def check_layout(checkpoint: LearnerCheckpoint, parameters: Mapping[str, Tensor]) -> None:
    """Raise `CorruptError` unless the weights are exactly these parameters."""
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in parameters.items()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in checkpoint.weights.items()}
    if wanted != found:
        name = sorted(set(wanted.items()) ^ set(found.items()), key=lambda item: item[0])[0][0]
        raise CorruptError(f"learner checkpoint: tensor {name} isn't the model's; another model's checkpoint?", code="checkpoint")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
