"""What `towline delta` does; the commands' declarations stand apart, since `towline --help` needs neither numpy nor the codec.

Nothing is left behind where it fails: outputs are written beside their place and renamed when they are whole.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from towline.delta import codec, files
from towline.delta.part import PartReader
from towline.delta.state import DTYPE_BYTES, copy_state, layout_of, model_digest, tensor_digests
from towline.errors import CorruptError, MissingError, UsageError
from towline.store.keys import lacking_part

PARTS = "part-*.safetensors"


def diff(old: Path, new: Path, output: Path, mode: str, checksum: str, threads: int | None, as_json: bool) -> None:
    """Write the delta that turns OLD into NEW."""
    base, target = files.load_model(old), files.load_model(new)
    with _replacing_folder(output) as folder:
        digest = model_digest(tensor_digests(base))
        encoding = codec.encode(base, target, mode=mode, checksum=checksum, threads=threads, base_digest=digest)
        _write_parts(encoding, folder)
    _print(_encode_summary(encoding.report), as_json)


def apply(old: Path, delta: Path, output: Path, threads: int | None, as_json: bool) -> None:
    """Apply DELTA to OLD, verify every tensor and write the result: a file where OLD is one, else a folder like OLD."""
    parts = _parts(delta)
    base = files.load_model(old)
    _refuse_existing(output)
    state = copy_state(base)
    report = codec.apply(state, _read(parts), layout=layout_of(base), digests=None, threads=threads)
    began = time.perf_counter()
    if old.is_dir():
        with _replacing_folder(output) as folder:
            _copy_other_files(old, folder)
            files.save_folder(state, folder)
    else:
        files.write_safetensors(state, output, files.read_with_metadata(old)[1] or None)
    summary: dict[str, Any] = {
        "changed": report.changed,
        "elements": report.elements,
        "density": report.density,
        "wire_bytes": report.wire_bytes,
        "model_bytes": sum(tensor.spec.nbytes for tensor in state.values()),
        "apply_seconds": report.seconds,
        "write_seconds": time.perf_counter() - began,
        "model_digest": model_digest(report.digests),
    }
    summary["apply_bytes_per_second"] = _per_second(summary["model_bytes"], report.seconds)
    _print(summary, as_json)


def fold(deltas: list[Path], output: Path, base: Path | None, mode: str, threads: int | None, as_json: bool) -> None:
    """Write one delta that does what several do one after another."""
    parts = [_parts(delta) for delta in deltas]
    if base is None and mode != "default":
        raise UsageError(f"folding to mode {mode} needs the base: give --base", code="delta_fold_mode")
    with _replacing_folder(output) as folder:
        if base is None:
            encoding = codec.fold([_read(each) for each in parts])
        else:
            first = files.load_model(base)
            state = copy_state(first)
            for each in parts:
                codec.apply(state, _read(each), layout=layout_of(first), digests=None, threads=threads)
            digest = model_digest(tensor_digests(first))
            encoding = codec.encode(first, state, mode=mode, threads=threads, base_digest=digest)
        _write_parts(encoding, folder)
    _print(_encode_summary(encoding.report), as_json)


def show(delta: Path, as_json: bool) -> None:
    """What a delta holds, from its tables. The streams aren't decoded: `apply` proves them."""
    summary: dict[str, Any] = {"parts": [], "tensors": []}
    blocks: dict[str, dict[str, Any]] = {}
    for path in _parts(delta):
        with _naming(path):
            reader = PartReader(path.read_bytes())
            frame_bytes = Counter[str]()
            for _, block, packed in reader.blocks():
                frame_bytes[block.codec] += sum(map(len, packed))
        table, specs = reader.head.table, reader.head.specs
        row = {"name": path.name, "bytes": path.stat().st_size, "blocks": len(table.blocks), "stream_bytes": dict(frame_bytes)}
        summary["parts"].append(row)
        summary |= {"kind": table.kind, "mode": table.mode, "checksum": table.checksum, "base": table.base}
        for block in table.blocks:
            for spec in specs[block.row : block.row + block.rows]:
                entry = blocks.setdefault(
                    spec.name, {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "codecs": []}
                )
                if block.codec not in entry["codecs"]:
                    entry["codecs"].append(block.codec)
                check = reader.head.tensor_checks.get(spec.name)
                if check is not None:
                    entry["checksum"] = check.hex()
        summary["changed"] = summary.get("changed", 0) + sum(block.changed for block in table.blocks)
        summary["elements"] = summary.get("elements", 0) + sum(block.count for block in table.blocks)
    summary["tensors"] = list(blocks.values())
    summary["wire_bytes"] = sum(part["bytes"] for part in summary["parts"])
    summary["model_bytes"] = sum(DTYPE_BYTES[row["dtype"]] * _elements(row["shape"]) for row in summary["tensors"])
    summary["density"] = summary["changed"] / summary["elements"] if summary["elements"] else 0.0
    if not as_json:
        summary |= {"parts": len(summary["parts"]), "tensors": len(summary["tensors"])}
    _print(summary, as_json)


def _elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _parts(delta: Path) -> list[Path]:
    """The delta's parts in order; a hole in their numbers is a missing part."""
    if not delta.is_dir():
        raise MissingError(f"there is no delta folder {delta}")
    parts = sorted(delta.glob(PARTS))
    if not parts:
        raise MissingError(f"{delta} holds no {PARTS}: it isn't a delta")
    if (lacking := lacking_part([path.name for path in parts])) is not None:
        raise CorruptError(f"{delta} lacks {lacking}", code="delta_incomplete")
    return parts


def _read(parts: Iterable[Path]) -> Iterator[bytes]:
    for path in parts:
        yield path.read_bytes()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}", code=error.code) from error


def _write_parts(encoding: codec.Encoding, folder: Path) -> None:
    for part in encoding:
        with files.replacing(folder / part.name) as file:
            file.write(part.data)


def _copy_other_files(source: Path, folder: Path) -> None:
    """What a checkpoint folder holds beside its weights: configuration, tokenizer."""
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".safetensors" and path.name != files.INDEX:
            shutil.copyfile(path, folder / path.name)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path} exists already: name another output, or remove it", code="output_exists")
    if not path.absolute().parent.is_dir():
        raise MissingError(f"there is no folder {path.absolute().parent}; create it", code="output_parent")


@contextmanager
def _replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, that becomes `path` when the block ends well and vanishes when it doesn't."""
    _refuse_existing(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.absolute().parent))
    try:
        with files.telling_of_room(path):
            os.chmod(temporary, 0o755)
            yield temporary
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _per_second(size: int, seconds: float) -> float:
    return size / seconds if seconds else 0.0


def _encode_summary(report: codec.EncodeReport) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "parts": report.parts,
        "wire_bytes": report.wire_bytes,
        "model_bytes": report.model_bytes,
        "ratio": report.model_bytes / report.wire_bytes,
        "changed": report.changed,
        "elements": report.elements,
        "density": report.density,
        "codecs": dict(Counter(report.codecs.values())),
        "encode_seconds": report.seconds,
        "encode_bytes_per_second": _per_second(report.model_bytes, report.seconds),
    }
    if all(report.digests.values()):
        summary["model_digest"] = model_digest(report.digests)
    return summary


def _print(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    width = max(map(len, summary))
    for name, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {count}" for key, count in value.items())
        elif isinstance(value, float):
            value = f"{value:.6g}"
        elif isinstance(value, int):
            value = f"{value:,}"
        print(f"{name:<{width}}  {value}")
