"""FORMAT.md once more, in plain Python over ints: the oracle that shares no code with what it checks."""

from __future__ import annotations

import json
import struct

import zstandard

WIDTH = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
         "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8}  # fmt: skip
FLOATS = {"BF16", "F16", "F32", "F64", "F8_E5M2", "F8_E4M3"}


def decode(model: dict[str, bytes], parts: list[bytes]) -> dict[str, bytes]:
    """The model (name -> bytes) after the parts."""
    out = {name: bytearray(data) for name, data in model.items()}
    for part in parts:
        (size,) = struct.unpack("<Q", part[:8])
        header = json.loads(part[8 : 8 + size])
        body = part[8 + size :]
        table_end, frames_at = header["table"]["data_offsets"][1], header["frames"]["data_offsets"][0]
        table = json.loads(zstandard.ZstdDecompressor().decompress(body[:table_end]))
        at = frames_at
        for codec, row, rows, start, count, _changed, lengths in table["blocks"]:
            streams = []
            for length in lengths:
                frame = body[at : at + length]
                streams.append(list(zstandard.ZstdDecompressor().decompress(frame)) if length else [])
                at += length
            names = [table["tensors"][r][0] for r in range(row, row + rows)]
            dtype = table["tensors"][row][1]
            w = WIDTH[dtype]
            joined = b"".join(out[name] for name in names)[start * w : (start + count) * w]
            values = [int.from_bytes(joined[i : i + w], "little") for i in range(0, len(joined), w)]
            _block(codec, values, streams, w, dtype in FLOATS)
            result = b"".join(value.to_bytes(w, "little") for value in values)
            for name in names:
                take = len(result) if rows == 1 else len(out[name])
                out[name][start * w : start * w + take], result = result[:take], result[take:]
        assert at == len(body)
    return {name: bytes(data) for name, data in out.items()}


def _key(v: int, w: int, float_: bool) -> int:
    sign, every = 1 << (8 * w - 1), (1 << 8 * w) - 1
    return v if not float_ else (v ^ every if v & sign else v | sign)


def _unkey(k: int, w: int, float_: bool) -> int:
    sign, every = 1 << (8 * w - 1), (1 << 8 * w) - 1
    return k if not float_ else (k ^ sign if k & sign else k ^ every)


def _add(v: int, zigzag: int, w: int, float_: bool) -> int:
    difference = zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2
    return _unkey((_key(v, w, float_) + difference) % (1 << 8 * w), w, float_)


def _runs(stream: list[int]) -> list[int]:
    out, total = [], 0
    for byte in stream:
        total += byte
        if byte != 255:
            out.append(total)
            total = 0
    assert total == 0
    return out


def _positions(stream: list[int]) -> list[int]:
    out, at = [], -1
    for gap in _runs(stream):
        at += gap + 1
        out.append(at)
    return out


def _codes(stream: list[int], bits: int, count: int) -> list[int]:
    each = 8 // bits
    return [(stream[i // each] >> (bits * (i % each))) & ((1 << bits) - 1) for i in range(count)]


def _planes(planes: list[list[int]]) -> list[int]:
    return [sum(byte << (8 * k) for k, byte in enumerate(row)) for row in zip(*planes, strict=True)]


def _steps(codes: list[int], small: list[int], planes: list[list[int]]) -> list[int]:
    smalls, wides, out = iter(small), iter(_planes(planes)), []
    for code in codes:
        if code == 3:
            byte = next(smalls)
            code = 3 + (next(wides) if byte == 255 else byte)
        out.append(code)
    assert next(smalls, None) is None
    assert next(wides, None) is None
    return out


def _near(key: int, low: int, modulus: int, below: int) -> int:
    return next(k for k in range(key - below, key - below + modulus) if k % modulus == low)


def _block(codec: str, values: list[int], streams: list[list[int]], w: int, float_: bool) -> None:
    if codec == "raw":
        values[:] = _planes(streams)
    elif codec == "diff":
        values[:] = [_add(v, z, w, float_) for v, z in zip(values, _planes(streams), strict=True)]
    elif codec == "ulp":
        at = _positions(streams[0])
        for i, step in zip(at, _steps(_codes(streams[1], 2, len(at)), streams[2], streams[3:]), strict=True):
            values[i] = _add(values[i], step + 1, w, float_)
    elif codec == "low2":
        at = _positions(streams[0])
        lows, wides = iter(streams[2]), iter(_planes(streams[3:]))
        for i, code in zip(at, _codes(streams[1], 4, len(at)), strict=True):
            if code == 5:
                values[i] = next(wides)
            else:
                low, modulus, below = (code, 4, 1) if code < 4 else (next(lows), 256, 127)
                values[i] = _unkey(_near(_key(values[i], w, float_), low, modulus, below) % (1 << 8 * w), w, float_)
    else:
        assert codec == "class"
        _class_block(values, streams)


def _class_block(values: list[int], streams: list[list[int]]) -> None:
    classes, kinds = streams[0][:256], streams[0][256:]
    members: list[list[int]] = [[] for _ in kinds]
    for i, v in enumerate(values):
        members[classes[(v >> 7) & 255]].append(i)
    at: list[int] = []
    codes: list[int] = []
    for c, kind in enumerate(kinds):
        first, second, third, packed = streams[1 + 4 * c : 5 + 4 * c]
        if kind == 0:
            places = _positions(first)
        elif kind == 1:
            extra, places, place = iter(_runs(third)), [], -1
            for low, high in zip(first, _codes(second, 2, len(first)), strict=True):
                place += 1 + low + 256 * (high if high < 3 else 3 + next(extra))
                places.append(place)
        else:
            places = [p for p in range(len(members[c])) if first[p // 8] >> (p % 8) & 1]
        at += [members[c][p] for p in places]
        codes += _codes(packed, 2, len(places))
    for i, step in zip(at, _steps(codes, streams[-3], streams[-2:]), strict=True):
        values[i] = _add(values[i], step + 1, 2, True)
