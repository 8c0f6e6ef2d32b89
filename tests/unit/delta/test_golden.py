"""Deltas that version 1 wrote once are read for ever, and what today's encoder writes decodes to the same streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.delta import frames
from towline.delta.codec import MODES, allocate, apply, encode
from towline.delta.files import read_safetensors
from towline.delta.part import PartReader, Table
from towline.delta.state import ModelState, copy_state, layout_of, tensor_digests
from unit.delta.plain_decoder import decode
from unit.delta.states import same

GOLDEN = Path(__file__).parents[2] / "golden" / "delta"


def golden() -> tuple[ModelState, ModelState]:
    return read_safetensors(GOLDEN / "old.safetensors"), read_safetensors(GOLDEN / "new.safetensors")


def parts(kind: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((GOLDEN / kind).glob("part-*.safetensors"))]


@pytest.mark.parametrize("kind", ["default", "dense", "idempotent", "full", "pieces"])
def test_a_golden_delta_is_read(kind: str) -> None:
    old, new = golden()
    state = allocate(layout_of(new)) if kind == "full" else copy_state(old)
    assert apply(state, parts(kind), layout=layout_of(new), digests=tensor_digests(new)).changed
    assert same(state, new)
    plain = decode({name: t.data.tobytes() for name, t in old.items()}, parts(kind))
    assert plain == {name: t.data.tobytes() for name, t in new.items()}


def contents(data: list[bytes]) -> list[tuple[Table, list[bytes]]]:
    """Tables without the lengths of frames, and streams: what doesn't depend on zstd's version."""
    out = []
    for part in data:
        reader = PartReader(part)
        streams = [frames.decompress(frame, 1 << 20).tobytes() for _, _, packed in reader.blocks() for frame in packed]
        rows = [(b.codec, b.row, b.rows, b.start, b.count, b.changed) for b in reader.head.table.blocks]
        out.append((reader.head.table.tensors, rows, reader.head.tensor_checks, reader.head.block_checks, streams))
    return out


@pytest.mark.parametrize("kind", ["default", "dense", "idempotent", "full", "pieces"])
def test_todays_encoder_writes_what_the_golden_delta_holds(kind: str) -> None:
    old, new = golden()
    base = None if kind == "full" else old
    block_bytes = 1024 if kind == "pieces" else None
    encoding = encode(base, new, mode=kind if kind in MODES else "default", block_bytes=block_bytes)
    assert contents([part.data for part in encoding]) == contents(parts(kind))


def test_the_golden_deltas_use_every_codec() -> None:
    used = {
        block.codec
        for kind in ("default", "dense", "idempotent")
        for part in parts(kind)
        for block in PartReader(part).head.table.blocks
    }
    assert used == {"ulp", "diff", "raw", "low2", "class"}
