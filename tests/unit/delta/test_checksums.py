"""The checksums inside parts are what they say, under each algorithm."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import xxhash

from towline.delta.codec import apply, encode
from towline.delta.part import PartReader
from towline.delta.state import copy_state, layout_of, tensor_digests
from unit.delta.states import random_state, same, step


def by_hand(algorithm: str, data: bytes) -> bytes:
    if algorithm == "blake3":
        return pytest.importorskip("blake3").blake3(data).digest()
    return xxhash.xxh3_128_digest(data) if algorithm == "xxh3-128" else zlib.adler32(data).to_bytes(4, "big")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3", "adler32"])
def test_every_tensor_and_every_piece_has_its_checksum(algorithm: str, threads: int) -> None:
    if algorithm == "blake3":
        pytest.importorskip("blake3")
    rng = np.random.default_rng(8)
    base = random_state(rng, 30)
    new = step(rng, base)
    encoding = encode(base, new, checksum=algorithm, block_bytes=512, threads=threads, max_part_bytes=20_000)
    parts = [part.data for part in encoding]
    checks: dict[str, bytes] = {}
    pieces = 0
    for data in parts:
        head = PartReader(data).head
        checks |= head.tensor_checks
        for index, check in head.block_checks.items():
            block = head.table.blocks[index]
            spec = head.specs[block.row]
            width = spec.nbytes // spec.elements
            state = new[spec.name].data[block.start * width : (block.start + block.count) * width]
            assert check == by_hand(algorithm, state.tobytes())
            pieces += 1
    assert pieces > 10
    assert checks == {name: by_hand(algorithm, t.data.tobytes()) for name, t in new.items()}
    assert encoding.report.digests == tensor_digests(new)
    state = copy_state(base)
    report = apply(state, parts, layout=layout_of(base), digests=tensor_digests(new), threads=threads)
    assert same(state, new)
    assert report.digests == tensor_digests(new)
