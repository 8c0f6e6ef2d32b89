"""A torch learner's checkpoint as bytes: safetensors and one JSON file, nothing that could run code.

It holds whole tensors by parameter name, over one part per rank that wrote it, so any number of ranks, laid out in any way, reads
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from towline.errors import CorruptError

TRAINER = "learner.json"
FORMAT = 1
_RANDOM = "random_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's tensors, whole: fp32 masters by parameter name, and "FIELD/PARAMETER" -> AdamW's."""

    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What all ranks share. `parts` ranks wrote the checkpoint."""

    step: int
    skipped_steps: int
    random_state: Tensor
    """uint8[n] of the generator that orders the rows."""
    parts: int = 1


def weights_name(part: int, parts: int) -> str:
    return "weights.safetensors" if parts == 1 else f"weights-{part:05d}-of-{parts:05d}.safetensors"


def optimiser_name(part: int, parts: int) -> str:
    return "optimiser.safetensors" if parts == 1 else f"optimiser-{part:05d}-of-{parts:05d}.safetensors"


def write(part: Part, number: int, progress: Progress) -> dict[str, bytes]:
    """The files of rank `number`. Equal checkpoints give equal bytes."""
    optimiser = {**part.optimiser, _RANDOM: progress.random_state} if number == 0 else part.optimiser
    files = {
        weights_name(number, progress.parts): save(_plain(part.weights)),
        optimiser_name(number, progress.parts): save(_plain(optimiser)),
    }
    if number == 0:
        meta = {"format": FORMAT, "step": progress.step, "skipped_steps": progress.skipped_steps, "parts": progress.parts}
        files[TRAINER] = json.dumps(meta).encode()
    return files


def read_progress(files: Mapping[str, bytes]) -> Progress:
    """`CorruptError` where a file is missing or isn't one."""
    try:
        meta = json.loads(files[TRAINER])
        if meta["format"] != FORMAT:
            raise CorruptError(f"learner checkpoint: format {meta['format']}, this learner knows {FORMAT}", code="checkpoint")
        parts = int(meta.get("parts", 1))
        return Progress(
            step=int(meta["step"]),
            skipped_steps=int(meta["skipped_steps"]),
            random_state=load(files[optimiser_name(0, parts)])[_RANDOM],
            parts=parts,
        )
    except (KeyError, ValueError, TypeError, SafetensorError) as error:
        raise _corrupt(error) from error


def read_parts(files: Mapping[str, bytes], progress: Progress) -> Iterator[Part]:
    """One at a time: a whole checkpoint needn't fit into memory. `CorruptError` as above."""
    for number in range(progress.parts):
        try:
            optimiser = load(files[optimiser_name(number, progress.parts)])
            weights = load(files[weights_name(number, progress.parts)])
        except (KeyError, ValueError, TypeError, SafetensorError) as error:
            raise _corrupt(error) from error
        optimiser.pop(_RANDOM, None)
        yield Part(weights=weights, optimiser=optimiser)


def check_layout(files: Mapping[str, bytes], progress: Progress, parameters: Mapping[str, Tensor]) -> None:
    """Raise `CorruptError` unless the parts hold exactly these parameters, by their headers."""
    wanted = {name: ("F32", tuple(parameter.shape)) for name, parameter in parameters.items()}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number in range(progress.parts):
        try:
            found |= _header(files[weights_name(number, progress.parts)])
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise _corrupt(error) from error
    if wanted != found:
        name = sorted(set(wanted.items()) ^ set(found.items()), key=lambda item: item[0])[0][0]
        raise CorruptError(f"learner checkpoint: tensor {name} isn't the model's; another model's checkpoint?", code="checkpoint")


def _header(data: bytes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A safetensors file's names: a length (u64), then so much JSON."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return {name: (item["dtype"], tuple(item["shape"])) for name, item in header.items() if name != "__metadata__"}


def _corrupt(error: Exception) -> CorruptError:
    return CorruptError(f"learner checkpoint: {type(error).__name__}: {error}", code="checkpoint")


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
