"""A tensor of more than 2**31 elements and 2**32 bytes goes through everything bit for bit.

It is zeros but for a few places: memory that is only read costs nothing, so that these run on a small machine.
The `slow` one goes through files and the command, and takes 10 GB of memory and 20 GB of disk: `make test-large`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from towline.cli.main import app
from towline.delta import backend, classes
from towline.delta.classes import NumpyScans
from towline.delta.codec import apply, encode, fold
from towline.delta.files import read_safetensors
from towline.delta.state import ModelState, RawTensor, TensorSpec, layout_of, model_digest

ELEMENTS = (1 << 31) + (1 << 20) + 3
NAME = "lm_head.weight"
Values = dict[int, int]
"""Element -> its bits."""


def _values() -> tuple[Values, Values, Values]:
    """Three states in a row: changes on both sides of every power of two that an index could wrap at, and dense stretches."""
    rng = np.random.default_rng(51)
    edges = [at + d for at in (0, 1 << 29, 1 << 30, 1 << 31) for d in (-2, -1, 0, 1, 2) if at + d >= 0] + [
        ELEMENTS - 2,
        ELEMENTS - 1,
    ]
    spread = rng.integers(0, ELEMENTS, 12).tolist()
    stretch = range((1 << 31) + 4096, (1 << 31) + 4096 + 3000)
    first = {at: int(rng.integers(0x3C00, 0x3E00)) for at in {*edges, *spread, *stretch}}
    second = {at: bits + 1 if at % 3 else bits ^ 0x8000 for at, bits in first.items()} | {(1 << 31) + 99_999: 0x7FC1}
    third = {at: bits - 1 if at % 2 else bits for at, bits in second.items()} | {(1 << 31) + 77_777: 0x0001}
    return first, second, third


STATES = _values()


def state_of(values: Values) -> ModelState:
    data = np.zeros(2 * ELEMENTS, np.uint8)
    bits = data.view("<u2")
    bits[np.fromiter(values, np.int64)] = np.fromiter(values.values(), np.uint16)
    return {NAME: RawTensor(TensorSpec(NAME, "BF16", (ELEMENTS,)), data)}


def is_state(state: ModelState, values: Values) -> bool:
    bits = state[NAME].data.view("<u2")
    held = np.array_equal(bits[np.fromiter(values, np.int64)], np.fromiter(values.values(), np.uint16))
    return held and state[NAME].digest() == state_of(values)[NAME].digest()


def changed(old: Values, new: Values) -> int:
    return sum(old.get(at, 0) != bits for at, bits in new.items())


@pytest.mark.parametrize("mode", ["default", "dense", "idempotent"])
def test_a_tensor_of_more_than_4_gib_is_encoded_and_applied(mode: str) -> None:
    old, new, _ = STATES
    base = state_of(old)
    encoding = encode(base, state_of(new), mode=mode, max_part_bytes=256)
    parts = [part.data for part in encoding]
    assert len(parts) > 1
    assert encoding.report.changed == changed(old, new)
    assert encoding.report.digests == {NAME: state_of(new)[NAME].digest()}
    report = apply(base, parts, layout=layout_of(base), digests=encoding.report.digests)
    assert report.changed == changed(old, new)
    assert is_state(base, new)


def test_deltas_of_more_than_4_gib_fold() -> None:
    states = [state_of(values) for values in STATES]
    deltas = [[part.data for part in encode(a, b)] for a, b in pairwise(states)]
    folded = fold(deltas)
    parts = [part.data for part in folded]
    apply(states[0], parts, layout=layout_of(states[0]), digests=folded.report.digests)
    assert is_state(states[0], STATES[2])


FAR = (1 << 32) + 4000
"""An element whose index doesn't fit 32 bits."""


@pytest.fixture
def far(tmp_path: Path) -> Callable[[str], np.ndarray[Any, np.dtype[np.uint8]]]:
    """uint8 views that are long enough for FAR, holes in a file: only touched pages exist."""

    def make(name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(2 * FAR + 4096)
        return np.asarray(np.memmap(path, np.uint8, "r+"))

    return make


def test_the_kernels_reach_elements_beyond_2_to_the_32nd(far: Callable[[str], np.ndarray[Any, Any]]) -> None:
    pytest.importorskip("numba")
    from towline.delta import kernels16

    old, new = far("old"), far("new")
    where = np.array([FAR - 500, FAR - 401, FAR - 400, FAR - 1])
    old.view("<u2")[where], new.view("<u2")[where] = [0x3C00, 0, 0xBC00, 0x3C00], [0x3C01, 0x7FC1, 0xBC02, 0x0001]
    start, room = FAR - 600, np.zeros(1 << 16, np.uint8)
    state = np.array([start - 1, 0, 0, 0, 0], np.uint64)
    streams = [room.copy() for _ in range(5)]
    kernels16.encode(old, new, start, FAR, 0xFFFF, state, np.empty(kernels16.POSITIONS_ROOM, np.uint32), *streams)
    _, gaps, entries, small, whole = map(int, state)
    assert entries == 4
    data = [stream[:n] for stream, n in zip(streams, (gaps, -(-entries // 4), small, whole, whole), strict=True)]
    state = np.array([start - 1, 0, 0, 0, 0], np.uint64)
    assert kernels16.decode(old, start, FAR, 0xFFFF, state, np.empty(kernels16.AHEAD, np.uint32), *data)
    assert np.array_equal(old.view("<u2")[start:FAR], new.view("<u2")[start:FAR])
    assert not old.view("<u2")[:4096].any()  # where an index cut to 32 bits would write


def test_ranks_and_runs_are_counted_in_64_bits() -> None:
    few = np.zeros(1000, np.uint16)
    for each in (NumpyScans(), backend.backend().scans):
        ranks, sizes = each.ranks(few, np.zeros(256, np.uint8), np.array([3, 999]))
        places, _ = each.locate(few, np.zeros(256, np.uint8), ranks, np.array([0, 2]))
        assert {array.dtype for array in (ranks, sizes, places)} == {np.dtype(np.int64)}
    far = np.array([(1 << 33) + 7, (1 << 34) + 1])
    kinds = [classes._place(far, 1 << 35)]
    assert [classes._find(kind, streams, 1 << 35).tolist() for kind, streams in kinds] == [far.tolist()]


def _file(path: Path, values: Values) -> None:
    header = json.dumps({NAME: {"dtype": "BF16", "shape": [ELEMENTS], "data_offsets": [0, 2 * ELEMENTS]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * ELEMENTS)
    bits = np.memmap(path, "<u2", "r+", 8 + len(header))
    bits[np.fromiter(values, np.int64)] = np.fromiter(values.values(), np.uint16)
    bits.flush()


@pytest.mark.slow
@pytest.mark.parametrize("checksum", ["xxh3-128", "blake3", "adler32"])
def test_the_command_takes_a_tensor_of_more_than_4_gib(tmp_path: Path, checksum: str) -> None:
    def call(*arguments: object) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["delta", *map(str, arguments), "--json"])
        if result.exception is not None:
            raise result.exception
        out: dict[str, Any] = json.loads(result.stdout)
        return out

    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path, values in zip(paths, STATES, strict=True):
        _file(path, values)
    digests = [model_digest({NAME: state_of(values)[NAME].digest()}) for values in STATES]
    for number, (old, new) in enumerate(pairwise(paths), 1):
        made = call("diff", old, new, "-o", tmp_path / f"d{number}", "--checksum", checksum)
        assert made["changed"] == changed(STATES[number - 1], STATES[number])
        assert made["model_digest"] == digests[number]
    result = tmp_path / "result.safetensors"
    applied = call("apply", paths[0], tmp_path / "d1", "-o", result)
    assert applied["model_digest"] == digests[1]
    assert is_state(read_safetensors(result), STATES[1])
    result.unlink()
    call("fold", tmp_path / "d1", tmp_path / "d2", "-o", tmp_path / "d")
    assert call("show", tmp_path / "d")["model_bytes"] == 2 * ELEMENTS
    assert call("apply", paths[0], tmp_path / "d", "-o", result)["model_digest"] == digests[2]
    assert is_state(read_safetensors(result), STATES[2])
    result.unlink()
    folder = tmp_path / "folder"
    folder.mkdir()
    paths[1].rename(folder / "model.safetensors")
    call("apply", folder, tmp_path / "d2", "-o", tmp_path / "folder2")
    assert is_state(read_safetensors(tmp_path / "folder2" / "model.safetensors"), STATES[2])


@pytest.mark.slow
def test_a_full_model_of_more_than_4_gib_goes_in_many_parts() -> None:
    new = state_of(STATES[1])
    encoding = encode(None, new, max_part_bytes=10_000)
    parts = [part.data for part in encoding]
    assert len(parts) > 10
    empty = {NAME: RawTensor(new[NAME].spec, np.zeros(2 * ELEMENTS, np.uint8))}
    apply(empty, parts, layout=layout_of(new), digests=encoding.report.digests)
    assert is_state(empty, STATES[1])
