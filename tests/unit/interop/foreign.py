"""The miles/slime layout read and written from its description alone: no code of Towline's."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard

Tensors = dict[str, "np.ndarray[Any, np.dtype[np.uint8]]"]


def checksum(kind: str, data: bytes) -> str:
    if kind == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(data)
    if kind == "blake3":
        return str(blake3.blake3(data).hexdigest())
    return f"{zlib.adler32(data):08x}"


def parse(path: Path) -> tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]:
    """name -> (dtype, shape, bytes), metadata."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    body = data[8 + size :]
    return {n: (h["dtype"], h["shape"], body[slice(*h["data_offsets"])]) for n, h in header.items()}, metadata


def build(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str], twice: str = "") -> None:
    """A safetensors file; the name `twice` stands there a second time."""
    rows, body = [], b""
    for name, (dtype, shape, data) in tensors.items():
        offsets = [len(body), len(body) + len(data)]
        for _ in range(2 if name == twice else 1):
            rows.append(f"{json.dumps(name)}:{json.dumps({'dtype': dtype, 'shape': shape, 'data_offsets': offsets})}")
        body += data
    text = ("{" + ",".join([f'"__metadata__":{json.dumps(metadata)}', *rows]) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def publish(root: Path, version: int, base: int, old: Tensors, new: Tensors, encoding: str, kind: str, **more: Any) -> Path:
    """Write a delta folder. more: packed {name: bytes} instead of what is right, twice, checks {name: text}, index False."""
    folder = root / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    packed, checks = {}, {}
    for name in new:
        if np.array_equal(old[name], new[name]):
            continue
        if encoding == "xor":
            raw = (old[name] ^ new[name]).tobytes()
        else:
            at = np.flatnonzero(old[name] != new[name])
            raw = struct.pack("<I", at.size) + at.astype("<u4").tobytes() + new[name][at].tobytes()
        frame = more.get("packed", {}).get(name, zstandard.compress(raw, 1))
        packed[name] = ("U8", [len(frame)], frame)
        checks[name] = more.get("checks", {}).get(name, checksum(kind, new[name].tobytes()))
    file = "model-00001-of-00001.safetensors"
    if packed:
        build(folder / file, packed, checks, more.get("twice", ""))
    index = {
        "metadata": {"version": f"{version:06d}", "base_version": f"{base:06d}", "delta_encoding": encoding,
                     "compression_format": "zstd", "checksum_format": kind},
        "weight_map": dict.fromkeys(packed, file),
    }  # fmt: skip
    if more.get("index", True):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def apply(folder: Path, old: Tensors) -> Tensors:
    """The folder's state on top of `old`, every rule of the layout asserted."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    meta = index["metadata"]
    new = {name: data.copy() for name, data in old.items()}
    if "delta_encoding" not in meta:
        for file in set(index["weight_map"].values()):
            new.update({n: np.frombuffer(d, np.uint8).copy() for n, (_, _, d) in parse(folder / file)[0].items()})
        return new
    assert (meta["compression_format"], meta["version"]) == ("zstd", folder.name[-6:])
    for file in sorted(set(index["weight_map"].values())):
        tensors, checks = parse(folder / file)
        for name, (dtype, shape, frame) in tensors.items():
            assert (dtype, shape, index["weight_map"][name]) == ("U8", [len(frame)], file)
            raw = zstandard.decompress(frame, max_output_size=1 << 30)
            if meta["delta_encoding"] == "xor":
                new[name] ^= np.frombuffer(raw, np.uint8)
            else:
                count = struct.unpack("<I", raw[:4])[0]
                new[name][np.frombuffer(raw[4 : 4 + 4 * count], "<u4")] = np.frombuffer(raw[4 + 4 * count :], np.uint8)
            assert checks[name] == checksum(meta["checksum_format"], new[name].tobytes())
    return new
