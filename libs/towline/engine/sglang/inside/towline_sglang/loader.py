"""Towline's weight loader: each rank of an SGLang server writes its own shard of the tensors in a host-local file.

SGLang calls `load` in every tensor-parallel rank between two batches. The command stands in the file that
TOWLINE_SGLANG_COMMAND names (JSON: id, path | null, layout {name: [dtype, shape]}, digest), so nothing is sent but "look
there". The ranks agree before the first write and after the last one; each leaves its outcome beside the command, as
status.rank<r>.json: id, ok, error, written (whether a write began), slices {name: [dim, start, length, xxh3-128]} of the
live weights, as published, or null where none were asked for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from safetensors import safe_open
from sglang.srt.distributed.parallel_state import get_world_group

from .views import View, live_views

T = TypeVar("T")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXACT = {
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.float64),
    (torch.float16, torch.float64), (torch.float32, torch.float64),
}  # fmt: skip
"""(published, live) dtypes that widen without loss; a narrower server would change the weights silently."""


def load(model: torch.nn.Module, named_tensors: Any) -> None:
    """SGLang's custom weight loader. Raises after it has left its status; the plugin makes that an answer."""
    path = Path(os.environ["TOWLINE_SGLANG_COMMAND"])
    command = json.loads(path.read_bytes())
    began = time.perf_counter()
    status: dict[str, Any] = {"id": command["id"], "ok": False, "written": False, "error": None, "slices": None}
    try:
        with torch.no_grad():
            _apply(model, command, status)
        status["ok"] = True
    except Exception as error:  # noqa: BLE001  (told to the client; raised again below)
        status["error"] = str(error)
    status["seconds"] = time.perf_counter() - began
    target = path.with_name(f"status.rank{torch.distributed.get_rank()}.json")
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(status))
    os.replace(temporary, target)
    if not status["ok"]:
        raise RuntimeError(status["error"])


def _apply(model: torch.nn.Module, command: dict[str, Any], status: dict[str, Any]) -> None:
    layout: dict[str, tuple[str, list[int]]] = command["layout"]
    views, file = _agree(lambda: _prepare(model, layout, command["path"]))

    def write() -> None:
        if file is None:
            return
        status["written"] = True
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            part, want = _pair(views[name], file, name, layout[name][1])
            part.copy_(want)
            # Read back what the engine will compute with.
            if not torch.equal(_bits(part.to(want.dtype).cpu()), _bits(want)):
                raise ValueError(f"tensor {name!r} isn't what was written")

    _agree(write)
    if command["digest"]:
        status["slices"] = {name: _digested(views[name], *layout[name]) for name in layout}


def _prepare(model: torch.nn.Module, layout: dict[str, tuple[str, list[int]]], path: str | None) -> tuple[dict[str, View], Any]:
    """Everything that can be refused, before the first write."""
    views = dict(live_views(model))
    if unknown := sorted(layout.keys() - views.keys()):
        raise KeyError(f"the server's model has no tensor {unknown[0]!r} ({len(unknown)} such names)")
    covered = {views[name].data.data_ptr() for name in layout}
    if missing := [name for name, view in views.items() if view.data.data_ptr() not in covered]:
        raise KeyError(f"the version lacks tensor {missing[0]!r} ({len(missing)} such names)")
    for name, (dtype, shape) in layout.items():
        _fits(name, views[name], dtype, shape)
    if path is None:
        return views, None
    file: Any = safe_open(path, "pt")
    for name in file.keys():  # noqa: SIM118
        piece = file.get_slice(name)
        if name not in layout or [piece.get_dtype(), piece.get_shape()] != [layout[name][0], list(layout[name][1])]:
            raise ValueError(f"tensor {name!r} of {path} isn't as the version's layout says")
    return views, file


def _fits(name: str, view: View, dtype: str, shape: list[int]) -> None:
    live, published = view.data, DTYPES.get(dtype)
    kept = [size for dim, size in enumerate(shape) if dim != view.dim]
    room = [size for dim, size in enumerate(live.shape) if dim != view.dim]
    if kept != room or len(shape) != live.dim() or (len(_ranks()) == 1 and list(live.shape) != list(shape)):
        raise ValueError(f"tensor {name!r} has the shape {shape}, the server's is {list(live.shape)}")
    if published is None or (published != live.dtype and (published, live.dtype) not in _EXACT):
        raise ValueError(f"tensor {name!r} is published as {dtype}, which a {live.dtype} server can't hold exactly")


def _pair(view: View, file: Any, name: str, shape: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's live part and the file's bytes for it; no more of the file is read."""
    part, size = view.part(shape)
    piece = file.get_slice(name)
    if not shape:
        return part, file.get_tensor(name)
    rows = slice(view.start, view.start + size) if size else slice(0, 0)
    return part, piece[rows] if view.dim == 0 else piece[:, rows]


def _digested(view: View, dtype: str, shape: list[int]) -> list[Any]:
    part, size = view.part(shape)
    value = part.to(DTYPES[dtype]).contiguous().reshape(-1)
    return [view.dim, view.start, size, xxhash.xxh3_128_hexdigest(value.view(torch.uint8).cpu().numpy().data)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _ranks() -> range:
    return range(torch.distributed.get_world_size(get_world_group().cpu_group))


def _everywhere(value: str | None) -> list[str | None]:
    """Each rank's value, in rank order; they all run this at the same time."""
    values: list[str | None] = [None for _ in _ranks()]
    torch.distributed.all_gather_object(values, value, group=get_world_group().cpu_group)
    return values


def _agree(work: Callable[[], T]) -> T:
    """Run work on every rank; raise on all of them where it raised on one."""
    result: T | None = None
    mine: str | None = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  (every rank must reach the exchange below)
        mine = f"{type(error).__name__}: {error}"
    errors = [f"rank {rank}: {error}" for rank, error in enumerate(_everywhere(mine)) if error]
    if errors:
        raise RuntimeError("; ".join(errors))
    return result  # type: ignore[return-value]
