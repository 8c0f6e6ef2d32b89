"""Files and folders hold a state bit for bit, agree with the safetensors package, and unsound ones are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from towline.delta import files
from towline.delta.files import load_folder, load_model, read_safetensors, read_with_metadata, save_folder, write_safetensors
from towline.errors import CorruptError, MissingError, UsageError
from unit.delta.states import random_state, same, tensor

STATE = random_state(np.random.default_rng(21), 30)


def test_a_file_holds_every_dtype_and_shape(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    assert write_safetensors(STATE, path, {"format": "pt", "é": "ü"}) == path.stat().st_size
    state, metadata = read_with_metadata(path)
    assert same(state, STATE)
    assert {name: t.spec for name, t in state.items()} == {name: t.spec for name, t in STATE.items()}
    assert metadata == {"format": "pt", "é": "ü"}
    assert not any(t.data.flags.writeable for t in state.values())
    assert same(read_safetensors(path.read_bytes()), STATE)
    assert list(tmp_path.iterdir()) == [path]


def test_the_safetensors_package_reads_and_writes_the_same(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("safetensors.torch")
    tensors = {
        "bf16": torch.randn(5, 7).bfloat16(),
        "fp8": torch.randn(11).to(torch.float8_e4m3fn),
        "fp32": torch.randn(3, 3),
        "scalar": torch.tensor(1.5),
        "none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "ids": torch.arange(4),
    }
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    library.save_file(tensors, theirs, metadata={"format": "pt"})
    state = read_safetensors(theirs)
    for name, value in tensors.items():
        assert state[name].data.tobytes() == value.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert state[name].spec.shape == tuple(value.shape)
    write_safetensors(state, ours, {"format": "pt"})
    back = library.load_file(ours)
    assert all(torch.equal(back[name].float(), tensors[name].float()) for name in tensors)


@pytest.mark.parametrize("limit", [1, 3000, 10**9])
def test_a_folder_comes_back_whole(tmp_path: Path, limit: int) -> None:
    written = save_folder(STATE, tmp_path / "new" / "m", limit)
    assert same(load_folder(tmp_path / "new" / "m"), STATE)
    assert same(load_model(tmp_path / "new" / "m"), STATE)
    assert sorted((tmp_path / "new" / "m").iterdir()) == sorted(written)
    if limit == 3000:
        shards = [path for path in written if path.suffix == ".safetensors"]
        assert len(shards) > 3
        assert all(
            sum(t.spec.nbytes for t in read_safetensors(p).values()) <= 3000 or len(read_safetensors(p)) == 1 for p in shards
        )
        index = json.loads((tmp_path / "new" / "m" / files.INDEX).read_bytes())
        assert index["metadata"]["total_size"] == sum(t.spec.nbytes for t in STATE.values())


def test_a_failed_write_leaves_nothing_and_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"before")

    def failing() -> None:
        with files.replacing(path) as out:
            out.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        failing()
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def _file(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _row(start: int, stop: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc", "too short"),
        (struct.pack("<Q", 1 << 60) + b"{}", "truncated"),
        (_file(b"{not json"), "can't be read"),
        (_file(b"[]"), "can't be read"),
        (_file(b'{"a":%s,"a":%s}' % ((json.dumps(_row(0, 1)).encode(),) * 2), b"x"), "'a' stands there twice"),
        (_file({"a": _row(0, 4)}, b"abc"), "'a'.*cut off"),
        (_file({"a": _row(0, 2, [3])}, b"ab"), "'a'.*offsets"),
        (_file({"a": _row(0, 2), "b": _row(1, 3)}, b"abc"), "'b'.*offsets"),
        (_file({"a": _row(1, 3)}, b"abc"), "'a'.*offsets"),
        (_file({"a": _row(0, 2)}, b"abc"), "belong to no tensor"),
        (_file({"a": _row(0, 2, dtype="Q4")}, b"ab"), "'a'.*unknown dtype"),
        (_file({"a": _row(0, 2, [-1, -2])}, b"ab"), "can't be read"),
        (_file({"a": {"dtype": "U8"}}, b"ab"), "can't be read"),
    ],
)
def test_an_unsound_file_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        read_safetensors(data)
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CorruptError, match=message):
        read_safetensors(tmp_path / "x")


def test_an_unsound_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no file"):
        read_safetensors(tmp_path / "none")
    with pytest.raises(MissingError, match="no safetensors"):
        load_folder(tmp_path)
    a, b = ({name: tensor(name, "U8", (3,), b"abc")} for name in "ab")
    write_safetensors(a | b, tmp_path / "one.safetensors")
    write_safetensors(b, tmp_path / "two.safetensors")
    with pytest.raises(CorruptError, match=r"'b' stands in .*two"):
        load_folder(tmp_path)

    def index(weight_map: object) -> None:
        (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))

    index({"a": "one.safetensors", "b": "one.safetensors"})
    assert same(load_folder(tmp_path), a | b)
    index({"a": "one.safetensors"})
    with pytest.raises(CorruptError, match="'b' is only in the shards"):
        load_folder(tmp_path)
    index({"b": "two.safetensors", "c": "two.safetensors"})
    with pytest.raises(CorruptError, match="'c' is only in the index"):
        load_folder(tmp_path)
    index({"b": "../two.safetensors"})
    with pytest.raises(CorruptError, match="outside"):
        load_folder(tmp_path)
    index({"b": "three.safetensors"})
    with pytest.raises(MissingError, match="three"):
        load_folder(tmp_path)
    index(3)
    with pytest.raises(CorruptError, match="can't be read"):
        load_folder(tmp_path)
    with pytest.raises(UsageError, match="max_shard_bytes"):
        save_folder(a, tmp_path, 0)
