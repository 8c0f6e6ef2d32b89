"""Whatever isn't the delta of this model to that state is refused, with the tensor's name, before it is called good."""

from __future__ import annotations

import contextlib
import json
import re

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from towline.delta import backend, frames, part
from towline.delta.codec import allocate, apply, encode
from towline.delta.state import RawTensor, TensorSpec, copy_state, layout_of, tensor_digests
from towline.errors import CorruptError, UsageError
from unit.delta.states import applied, parts_of, random_state, same, step, tensor

RNG = np.random.default_rng(11)
BASE = random_state(RNG, 12, ("BF16", "F32", "I8"))
NEW = step(RNG, BASE)


@pytest.mark.parametrize("mode", ["default", "dense", "idempotent"])
def test_no_flipped_bit_gives_another_state(mode: str) -> None:
    (data,) = parts_of(BASE, NEW, mode=mode)
    head = int.from_bytes(data[:8], "little") + 8
    streams_at = head + json.loads(data[8:head])["frames"]["data_offsets"][0]
    survived = 0
    places = np.unique(np.concatenate([np.arange(0, 700), RNG.integers(0, len(data), 600)]))
    for at in places[places < len(data)]:
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(RNG.integers(8))
        state = copy_state(BASE)
        try:
            apply(state, [bytes(damaged)], layout=layout_of(BASE), digests=None, threads=1)
        except CorruptError:
            continue
        survived += 1
        assert same(state, NEW)
        assert at >= streams_at, "a flip in the header or the table went unnoticed"
    assert survived < 20


def test_no_truncated_or_lengthened_part_is_applied() -> None:
    (data,) = parts_of(BASE, NEW)
    for size in [*range(0, 400, 7), *range(400, len(data), 997), len(data) - 1]:
        with pytest.raises(CorruptError):
            applied(BASE, [data[:size]], threads=1)
    with pytest.raises(CorruptError, match="goes on"):
        applied(BASE, [data + b"\0"])


@pytest.mark.parametrize("mode", ["default", "dense"])
def test_a_wrong_base_is_refused_by_name(mode: str) -> None:
    parts = parts_of(BASE, NEW, mode=mode)
    for name in BASE:
        if not BASE[name].data.size:
            continue
        wrong = copy_state(BASE)
        wrong[name].data[-1] ^= 0x40
        if same(wrong, {**BASE, name: NEW[name]}):
            continue
        with contextlib.suppress(CorruptError):
            assert same(applied(wrong, parts), NEW)  # a raw tensor doesn't depend on its base
            continue
        with pytest.raises(CorruptError, match=re.escape(repr(name))):
            applied(wrong, parts)


def test_a_piece_with_a_wrong_base_is_refused_by_name() -> None:
    base = {"w": tensor("w", "BF16", (4096,), np.arange(4096, dtype="<u2"))}
    new = {"w": tensor("w", "BF16", (4096,), np.arange(4096, dtype="<u2") + np.uint16(1))}
    parts = parts_of(base, new, block_bytes=1024)
    wrong = copy_state(base)
    wrong["w"].data[2 * 3000] ^= 1
    with pytest.raises(CorruptError, match=r"'w', elements 2560 to 3072"):
        applied(wrong, parts)


def _layout_change(name: str, dtype: str, shape: tuple[int, ...]) -> dict[str, RawTensor]:
    spec = TensorSpec(name, dtype, shape)
    return {name: RawTensor(spec, np.zeros(spec.nbytes, np.uint8))}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_layout_change("a", "F16", (4, 4)), "'a' is BF16"),
        (_layout_change("a", "BF16", (16,)), "'a' is BF16"),
        (_layout_change("b", "BF16", (4, 4)), "'a' isn't in the model"),
        (_layout_change("a", "BF16", (4, 4)) | _layout_change("c", "U8", ()), "'c' isn't whole"),
    ],
)
def test_another_layout_is_refused_by_name(other: dict[str, RawTensor], message: str) -> None:
    base = _layout_change("a", "BF16", (4, 4))
    new = {"a": tensor("a", "BF16", (4, 4), np.ones(16, "<u2"))}
    with pytest.raises(CorruptError, match=message):
        applied(other, parts_of(base, new))


def test_encoding_different_layouts_is_refused_by_name() -> None:
    a, b = _layout_change("a", "BF16", (4,)), _layout_change("b", "BF16", (4,))
    with pytest.raises(UsageError, match="'a'"):
        parts_of(a | b, b)
    with pytest.raises(UsageError, match="'a'"):
        parts_of(a, _layout_change("a", "BF16", (2, 2)))
    with pytest.raises(UsageError, match="mode"):
        encode(a, a, mode="best")
    with pytest.raises(UsageError, match="checksum"):
        encode(a, a, checksum="crc32")
    with pytest.raises(UsageError, match="block_bytes"):
        encode(a, a, block_bytes=12)


def test_parts_must_be_all_there_once_in_order() -> None:
    parts = parts_of(BASE, NEW, block_bytes=512, max_part_bytes=1000)
    assert len(parts) > 3
    for wrong in (parts[:-1], parts[1:], [parts[1], parts[0], *parts[2:]], [*parts, parts[-1]], [parts[0], *parts], []):
        with pytest.raises(CorruptError, match=r"tensor '|no part"):
            applied(BASE, wrong)


def test_a_state_that_cannot_be_written_or_shares_memory_is_refused() -> None:
    data = np.zeros(32, np.uint8)
    spec_a, spec_b = TensorSpec("a", "U8", (20,)), TensorSpec("b", "U8", (20,))
    shared = {"a": RawTensor(spec_a, data[:20]), "b": RawTensor(spec_b, data[12:])}
    parts = parts_of(shared, shared)
    with pytest.raises(UsageError, match="share memory"):
        apply(shared, parts, layout=layout_of(shared), digests=None)
    fixed = copy_state(shared)
    fixed["a"].data.flags.writeable = False
    with pytest.raises(UsageError, match="'a' can't be written"):
        apply(fixed, parts, layout=layout_of(fixed), digests=None)


def test_the_callers_digests_are_compared() -> None:
    digests = tensor_digests(NEW)
    name = next(n for n in sorted(NEW) if NEW[n].data.size)
    with pytest.raises(CorruptError, match=repr(name)):
        apply(copy_state(BASE), parts_of(BASE, NEW), layout=layout_of(BASE), digests=digests | {name: "0" * 32})


# --- parts that only a forger writes ---


def forged(tensors: list[tuple[str, str, tuple[int, ...]]], blocks: list[part.Block], packed: list[bytes], checks: int) -> bytes:
    table = part.Table("delta", "default", "adler32", None, tuple(tensors), tuple(blocks))
    return part.write_part(table, bytes(4 * checks), packed)


def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(size))


@pytest.mark.parametrize("codec", ["raw", "diff", "ulp", "low2"])
def test_no_more_is_decompressed_than_the_tensor_can_need(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _layout_change("w", "U8", (1000,))
    streams = {"raw": 1, "diff": 1, "ulp": 4, "low2": 4}[codec]
    asked: list[int] = []
    real = frames.zstandard.ZstdDecompressor

    class Watched:
        def __init__(self, **options: object) -> None:
            self._real = real(**options)

        def decompress(self, data: bytes, max_output_size: int = 0, **options: object) -> bytes:
            asked.append(max_output_size)
            return self._real.decompress(data, max_output_size=max_output_size, **options)

    for index in range(streams):
        packed = [b""] * streams
        packed[index] = bomb(100_000_000)
        block = part.Block(codec, 0, 1, 0, 1000, 1, tuple(map(len, packed)))
        data = forged([("w", "U8", (1000,))], [block], packed, 1)
        with monkeypatch.context() as patch:
            frames._context.__dict__.clear()
            patch.setattr(frames.zstandard, "ZstdDecompressor", Watched)
            with pytest.raises(CorruptError, match=r"'w'.*declares 100000000 bytes"):
                applied(model, [data], threads=1)
        frames._context.__dict__.clear()
    assert set(asked) == {part.MAX_TABLE_BYTES}


def test_a_frame_without_a_size_is_refused() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(10))
    block = part.Block("raw", 0, 1, 0, 10, 1, (len(packed),))
    with pytest.raises(CorruptError, match="doesn't state its size"):
        applied(_layout_change("w", "U8", (10,)), [forged([("w", "U8", (10,))], [block], [packed], 1)])


@pytest.mark.parametrize(
    ("tensors", "blocks", "message"),
    [
        ([("w", "U8", (4,)), ("w", "U8", (4,))], [("raw", 0, 2, 0, 8)], "twice"),
        ([("w", "U8", (4,))], [("raw", 0, 1, 0, 5)], "overruns"),
        ([("w", "U8", (4,))], [("raw", 0, 1, 0, 2), ("raw", 0, 1, 3, 1)], "follow"),
        ([("w", "U8", (4,))], [("raw", 0, 1, 0, 2), ("raw", 0, 1, 1, 3)], "follow"),
        ([("w", "U8", (4,)), ("v", "U8", (4,))], [("raw", 1, 1, 0, 4)], "follow"),
        ([("w", "U8", (4,)), ("v", "U8", (4,))], [("raw", 0, 1, 0, 4)], "no block covers"),
        ([("w", "U8", (4,)), ("v", "I8", (4,))], [("raw", 0, 2, 0, 8)], "mixes dtypes"),
        ([("w", "U8", (4,))], [("raw", 0, 3, 0, 4)], "follow"),
        ([("w", "U8", (-1, -4))], [("raw", 0, 1, 0, 4)], "impossible shape"),
        ([("w", "U9", (4,))], [("raw", 0, 1, 0, 4)], "unknown dtype"),
        ([("w", "U8", (4,))], [("zip", 0, 1, 0, 4)], "unknown codec"),
        ([("w", "U8", (4,))], [("class", 0, 1, 0, 4)], "doesn't fit"),
    ],
)
def test_an_impossible_table_is_refused(
    tensors: list[tuple[str, str, tuple[int, ...]]], blocks: list[tuple[str, int, int, int, int]], message: str
) -> None:
    rows = [part.Block(*block, 0, ()) for block in blocks]
    table = msgspec.json.encode(
        {"kind": "delta", "mode": "default", "checksum": "adler32", "base": None, "tensors": tensors, "blocks": rows}
    )
    packed = zstandard.ZstdCompressor().compress(table)
    for checks in range(4):
        digest = xxhash.xxh3_128_hexdigest(packed + bytes(4 * checks))
        data = part._header(len(packed), 4 * checks, 0, digest) + packed + bytes(4 * checks)
        with pytest.raises(CorruptError, match=rf"{message}|number of checksums"):
            applied(_layout_change("w", "U8", (4,)), [data])


def test_another_format_or_version_is_refused() -> None:
    (data,) = parts_of(BASE, NEW)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["version"] = "2"
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    with pytest.raises(CorruptError, match="version '2'"):
        applied(BASE, [data[:8] + text + data[8 + size :]])
    with pytest.raises(CorruptError, match="isn't a towline-delta part"):
        applied(BASE, [b"\x02\0\0\0\0\0\0\0{}"])


def test_parts_of_different_deltas_do_not_mix() -> None:
    a, b = _layout_change("a", "U8", (4,)), _layout_change("b", "U8", (4,))
    mixed = parts_of(a, a) + parts_of(b, b, checksum="adler32")
    with pytest.raises(CorruptError, match="aren't of one delta"):
        applied(allocate(layout_of(a | b)), mixed)
    assert same(applied(a | b, parts_of(a, a) + parts_of(b, b)), a | b)


@pytest.mark.parametrize("name", ["numpy", "numba"])
def test_places_that_no_element_of_their_class_has_are_refused(name: str) -> None:
    if name == "numba":
        pytest.importorskip("numba")
    rng = np.random.default_rng(13)
    old = rng.integers(0x3C00, 0x3E00, 400_000).astype("<u2")
    for share in (0.004, 0.05, 0.5):
        new = old + (rng.random(old.size) < share).astype("<u2")
        tools = backend.backend(name)
        _, streams = tools.encode("class", [old.view(np.uint8)], [new.view(np.uint8)], 2, True, lambda *_: None)
        good, other = old.copy(), np.full(old.size, 0x0080, "<u2")
        tools.decode("class", [good.view(np.uint8)], streams, 2, True, lambda *_: None)
        assert (good == new).all()
        with pytest.raises(CorruptError, match="places don't fit"):
            tools.decode("class", [other.view(np.uint8)], streams, 2, True, lambda *_: None)
