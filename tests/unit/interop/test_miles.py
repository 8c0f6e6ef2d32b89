"""The miles/slime layout, against a reader and a writer that know only its description; and each of its traps."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
import zstandard
from typer.testing import CliRunner

from towline.cli.main import app
from towline.config import StoreSettings
from towline.delta.files import load_folder, save_folder
from towline.delta.state import ModelState, RawTensor, TensorSpec, copy_state
from towline.errors import ConflictError, CorruptError, MissingError, UsageError
from towline.interop import miles_hooks, miles_host, miles_layout
from towline.interop.miles_export import Exporter
from towline.interop.miles_import import Importer
from towline.interop.miles_layout import (
    ENCODINGS,
    Encoding,
    folder_of,
    published,
    read_index,
    read_version,
    write_delta,
    write_full,
)
from towline.store.anchors import record_anchor, upload_anchor
from towline.store.base import seed_base
from towline.store.collect import collect
from towline.store.commit import BroughtEpoch
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.store.retention import Rules
from towline.store.versions import VersionFacts, materialize, write_version

from . import foreign

CHECKSUMS = ("xxh3-128", "blake3", "adler32")
KINDS = [(encoding, kind) for encoding in ENCODINGS for kind in CHECKSUMS]


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def model(seed: int = 0) -> ModelState:
    rng = np.random.default_rng(seed)
    specs = [TensorSpec("a.weight", "BF16", (32, 8)), TensorSpec("b.weight", "F32", (16,)), TensorSpec("c.scale", "F16", ())]
    return {spec.name: RawTensor(spec, rng.integers(0, 255, spec.nbytes, np.uint8)) for spec in specs}


def stepped(state: ModelState, seed: int) -> ModelState:
    """Some bytes of all tensors but the last are others."""
    rng, new = np.random.default_rng(seed), copy_state(state)
    for name in sorted(new)[:-1]:
        data = new[name].data
        data[rng.choice(data.size, 5, replace=False)] ^= 1 + seed % 200
    return new


def plain(state: ModelState) -> foreign.Tensors:
    return {name: tensor.data for name, tensor in state.items()}


def same(a: foreign.Tensors, b: foreign.Tensors) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture
def objects(file_store_settings: StoreSettings) -> ObjectStore:
    return open_store(file_store_settings)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save_folder(model(), tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text("{}")
    return tmp_path / "base"


class Trainer:
    """Commits versions to a run."""

    def __init__(self, objects: ObjectStore, base: Path, run: str = "run") -> None:
        self.objects, self.log = objects, Log(objects, run)
        seed_base(objects, self.log, base, "test", None, None)
        self.states: dict[int, ModelState] = {0: load_folder(base)}
        self.open()

    def open(self) -> None:
        self.epoch = BroughtEpoch(self.log, new_write_id())

    def commit(self) -> int:
        head = self.epoch.head
        state = stepped(self.states[head], self.log.next_number)
        depth = self.log.lineage.depth(head) + 1
        manifest = write_version(
            self.objects, self.log.run, epoch=self.epoch.epoch, base=head, write_id=new_write_id(), base_state=self.states[head],
            new_state=state, facts=VersionFacts(depth=depth, step=depth, batch_cursor=0),
        )  # fmt: skip
        number = self.epoch.commit(manifest, 0.0).number
        self.states[number] = state
        return number


@pytest.mark.parametrize(("encoding", "kind"), KINDS)
def test_what_is_written_is_what_others_read_and_the_other_way_round(tmp_path: Path, encoding: Encoding, kind: str) -> None:
    old, new = model(), stepped(model(), 3)
    ours = write_delta(tmp_path / "ours", 7, 6, old, new, encoding=encoding, checksum=kind, shard_bytes=300)
    assert len(list(ours.glob("model-0000*-of-00002.safetensors"))) == 2
    assert same(foreign.apply(ours, plain(old)), plain(new))
    theirs = foreign.publish(tmp_path / "theirs", 7, 6, plain(old), plain(new), encoding, kind)
    before = copy_state(old)
    assert same(plain(read_version(theirs, read_index(theirs), old)), plain(new))
    assert same(plain(old), plain(before))
    assert same(plain(read_version(ours, read_index(ours), old)), plain(new))
    with pytest.raises(CorruptError, match=r"'[ab]\.weight'"):
        read_version(theirs, read_index(theirs), stepped(old, 9))


def test_nothing_changed_is_a_version_too(tmp_path: Path) -> None:
    folder = write_delta(tmp_path, 1, 0, model(), model())
    assert [path.name for path in folder.iterdir()] == ["model.safetensors.index.json"]
    assert same(plain(read_version(folder, read_index(folder), model())), plain(model()))


def test_an_unfinished_folder_is_no_version_and_is_written_anew(tmp_path: Path) -> None:
    old, new = model(), stepped(model(), 3)
    foreign.publish(tmp_path, 1, 0, plain(old), plain(new), "xor", "xxh3-128", index=False)
    (tmp_path / "weight_v000001" / "leftover.safetensors").write_bytes(b"x")
    assert published(tmp_path) == []
    with pytest.raises(MissingError, match="isn't published"):
        read_index(folder_of(tmp_path, 1))
    folder = write_delta(tmp_path, 1, 0, old, new)
    assert not (folder / "leftover.safetensors").exists()
    with pytest.raises(UsageError, match="published already"):
        write_delta(tmp_path, 1, 0, old, new)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_zstd_bomb_is_refused_before_it_unpacks(tmp_path: Path, encoding: Encoding) -> None:
    old, new = model(), stepped(model(), 3)
    bomb = zstandard.compress(bytes(1 << 30), 1)
    assert len(bomb) < 1 << 20
    folder = foreign.publish(tmp_path, 1, 0, plain(old), plain(new), encoding, "xxh3-128", packed={"a.weight": bomb})
    began = time.perf_counter()
    with pytest.raises(CorruptError, match=r"'a\.weight': its frame holds more"):
        read_version(folder, read_index(folder), old)
    assert time.perf_counter() - began < 0.5


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    folder = foreign.publish(tmp_path, 1, 0, plain(model()), plain(stepped(model(), 3)), "xor", "xxh3-128", twice="b.weight")
    with pytest.raises(CorruptError, match=r"'b\.weight' stands there twice"):
        read_version(folder, read_index(folder), model())


@pytest.mark.parametrize("raw", [b"", b"\1\0\0\0", b"\1\0\0\0\xff\xff\xff\xff\7", b"\2\0\0\0\0\0\0\0\7"])
def test_an_overwrite_that_does_not_fit_is_refused(tmp_path: Path, raw: bytes) -> None:
    folder = foreign.publish(
        tmp_path,
        1,
        0,
        plain(model()),
        plain(stepped(model(), 3)),
        "overwrite",
        "xxh3-128",
        packed={"a.weight": zstandard.compress(raw)},
    )
    with pytest.raises(CorruptError, match="overwrite"):
        read_version(folder, read_index(folder), model())


def test_a_tensor_that_overwrite_can_not_address_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = model(), stepped(model(), 3)
    assert miles_layout.MAX_OVERWRITE_BYTES == 2**32
    theirs = foreign.publish(tmp_path / "theirs", 1, 0, plain(old), plain(new), "overwrite", "xxh3-128")
    monkeypatch.setattr(miles_layout, "MAX_OVERWRITE_BYTES", 500)
    with pytest.raises(UsageError, match=r"'a\.weight' has more than 4 GiB"):
        write_delta(tmp_path / "ours", 1, 0, old, new, encoding="overwrite")
    assert published(tmp_path / "ours") == []
    with pytest.raises(UsageError, match=r"'a\.weight' has more than 4 GiB"):
        read_version(theirs, read_index(theirs), old)
    assert write_delta(tmp_path / "ours", 1, 0, old, new).is_dir()


def test_other_tensors_or_a_strange_index_are_refused(tmp_path: Path) -> None:
    old, new = plain(model()), plain(stepped(model(), 3))
    more = {**new, "z.weight": np.ones(4, np.uint8)}
    folder = foreign.publish(tmp_path, 1, 0, {**old, "z.weight": np.zeros(4, np.uint8)}, more, "xor", "xxh3-128")
    with pytest.raises(CorruptError, match=r"'z\.weight'"):
        read_version(folder, read_index(folder), model())
    path = folder / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    for key, value in [
        ("delta_encoding", "magic"),
        ("checksum_format", "md5"),
        ("compression_format", "lz4"),
        ("version", "000009"),
    ]:
        path.write_text(json.dumps({**good, "metadata": {**good["metadata"], key: value}}))
        with pytest.raises(CorruptError):
            read_index(folder)
    path.write_text(json.dumps({**good, "weight_map": {"a.weight": "../x.safetensors"}}))
    with pytest.raises(CorruptError, match="outside"):
        read_index(folder)
    path.write_text(json.dumps(good | {"metadata": good["metadata"] | {"version": 1, "base_version": 0}}))
    assert read_index(folder).base_version == 0  # numbers as numbers are understood too


@pytest.mark.parametrize(("encoding", "kind"), [("xor", "xxh3-128"), ("overwrite", "adler32")])
def test_a_run_goes_out_and_comes_in_elsewhere(
    objects: ObjectStore, base: Path, tmp_path: Path, encoding: Encoding, kind: str
) -> None:
    trainer, root = Trainer(objects, base), tmp_path / "out"
    exporter = Exporter(objects, Log(objects, "run"), root, encoding=encoding, checksum=kind, reader="bridge")
    assert exporter.step() == []
    numbers = [trainer.commit() for _ in range(2)]
    assert [(d.miles_version, d.version, d.full) for d in exporter.step()] == [(1, numbers[0], False), (2, numbers[1], False)]
    trainer.open()
    numbers.append(trainer.commit())
    again = Exporter(objects, Log(objects, "run"), root, encoding=encoding, checksum=kind)  # another process goes on
    assert [d.miles_version for d in again.step()] == [3]
    state = plain(trainer.states[0])
    for number, version in enumerate(numbers, 1):
        state = foreign.apply(folder_of(root, number), state)
        assert same(state, plain(trainer.states[version]))
    log = Log(objects, "copy")
    importer = Importer(objects, log, root, base)
    assert [b.miles_version for b in importer.step()] == [1, 2, 3]
    assert importer.step() == []
    log.refresh()
    assert log.version(log.lineage.latest).model_digest == trainer.log.version(numbers[-1]).model_digest
    assert same(plain(materialize(objects, log, log.lineage.latest)), state)


def test_a_follower_far_behind_writes_one_full_checkpoint(objects: ObjectStore, base: Path, tmp_path: Path) -> None:
    trainer = Trainer(objects, base)
    numbers = [trainer.commit() for _ in range(5)]
    done = Exporter(objects, Log(objects, "run"), tmp_path / "out", max_chain=3).step()
    assert [(d.miles_version, d.full) for d in done] == [(5, True)]
    folder = folder_of(tmp_path / "out", 5)
    assert same(foreign.apply(folder, {}), plain(trainer.states[numbers[-1]]))
    assert (folder / "config.json").read_text() == "{}"
    Importer(objects, log := Log(objects, "copy"), tmp_path / "out", base).step()
    log.refresh()
    assert log.version(log.lineage.latest).step == 5


def test_after_a_version_that_retention_gave_up_comes_a_full_checkpoint(objects: ObjectStore, base: Path, tmp_path: Path) -> None:
    trainer, root = Trainer(objects, base), tmp_path / "out"
    numbers = [trainer.commit() for _ in range(4)]
    Exporter(objects, Log(objects, "run"), tmp_path / "other").step()
    for number in (numbers[2], numbers[3]):
        record_anchor(objects, "run", upload_anchor(objects, "run", number, new_write_id(), trainer.states[number]))
    for _ in range(2):
        collect(objects, trainer.log, Rules(grace_seconds=0.0))
    done = Exporter(objects, Log(objects, "run"), root).step()
    assert [(d.miles_version, d.version, d.full) for d in done] == [(3, numbers[2], True), (4, numbers[3], False)]
    state = foreign.apply(folder_of(root, 4), foreign.apply(folder_of(root, 3), {}))
    assert same(state, plain(trainer.states[numbers[3]]))
    assert folder_of(root, 4).joinpath("model.safetensors.index.json").read_bytes() == (
        folder_of(tmp_path / "other", 4).joinpath("model.safetensors.index.json").read_bytes()
    )  # hosts agree
    Importer(objects, log := Log(objects, "copy"), root, base).step()
    log.refresh()
    assert log.version(log.lineage.latest).model_digest == trainer.log.version(numbers[3]).model_digest


def test_a_folder_of_another_run_is_refused(objects: ObjectStore, base: Path, tmp_path: Path) -> None:
    foreign.publish(tmp_path / "out", 1, 0, plain(model()), plain(stepped(model(), 3)), "xor", "xxh3-128")
    Trainer(objects, base).commit()
    with pytest.raises(UsageError, match="wasn't exported from run"):
        Exporter(objects, Log(objects, "run"), tmp_path / "out").step()


def test_an_importer_is_fenced_by_the_next_and_keeps_off_a_trainers_run(objects: ObjectStore, base: Path, tmp_path: Path) -> None:
    root = tmp_path / "in"
    states = [plain(model())] + [plain(stepped(model(), seed)) for seed in (3, 4, 5)]
    foreign.publish(root, 1, 0, states[0], states[1], "xor", "blake3")
    with pytest.raises(UsageError, match="--base"):
        Importer(objects, Log(objects, "copy"), root)
    first = Importer(objects, Log(objects, "copy"), root, base)
    first.step()
    second = Importer(objects, Log(objects, "copy"), root)
    assert second.at == 1
    foreign.publish(root, 2, 1, states[1], states[2], "xor", "blake3")
    assert [b.miles_version for b in second.step()] == [2]
    with pytest.raises(ConflictError, match="opened after"):
        first.step()
    foreign.publish(root, 4, 3, states[1], states[3], "xor", "blake3")
    assert second.step() == []  # 3 isn't there yet
    shutil.rmtree(folder_of(root, 2))
    foreign.publish(root, 2, 1, states[1], states[3], "xor", "blake3")
    with pytest.raises(UsageError, match="began anew"):
        Importer(objects, Log(objects, "copy"), root)
    Trainer(objects, base, "trained")
    with pytest.raises(ConflictError, match="has a trainer"):
        Importer(objects, Log(objects, "trained"), root)


def test_a_host_copy_is_right_after_a_crash_amid_an_xor_and_when_it_is_past_the_base(base: Path, tmp_path: Path) -> None:
    source, local = tmp_path / "source", tmp_path / "local"
    states = [load_folder(base)]
    save_folder(states[0], base, max_shard_bytes=300)
    (base / "model.safetensors").unlink()
    for number in range(1, 4):
        states.append(stepped(states[-1], number))
        foreign.publish(source, number, number - 1, plain(states[number - 1]), plain(states[number]), "xor", "xxh3-128")
    assert miles_host.pull(local, base, source, 1) == 1
    state_file = local / ".weight_sync" / "state.json"
    assert json.loads(state_file.read_text()) == {"version": "000001"}
    half = {path: path.read_bytes() for path in local.glob("*.safetensors")}
    assert len(half) > 1
    assert miles_host.pull(local, base, source, 2) == 1
    first = sorted(half)[0]  # as if it had died after the first file
    for path in sorted(half)[1:]:
        path.write_bytes(half[path])
    assert first.read_bytes() != half[first]
    state_file.write_text(json.dumps({"version": "000001", "applying": "000002"}))
    assert miles_host.pull(local, base, source, 2) == 1
    assert same(plain(load_folder(local)), plain(states[2]))
    state_file.write_text(json.dumps({"version": "000001", "applying": "000002"}))
    miles_host.pull(local, base, source, 1)  # neither version: begun anew
    assert same(plain(load_folder(local)), plain(states[1]))
    miles_host.pull(local, base, source, 3)
    miles_host.pull(local, base, source, 1)  # past the target
    assert same(plain(load_folder(local)), plain(states[1]))
    assert miles_host.pull(local, base, source, 1) == 0
    with pytest.raises(MissingError, match="isn't published"):
        miles_host.pull(local, base, source, 9)
    path = next(path for path in local.glob("*.safetensors") if "a.weight" in load_safe(path))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        miles_host.pull(local, base, source, 3)
    miles_host.pull(local, base, source, 3)
    assert same(plain(load_folder(local)), plain(states[3]))
    write_full(source, 5, states[1], {"config.json": b"{}"})
    assert miles_host.pull(local, base, source, 5) == 0
    assert same(plain(load_folder(local)), plain(states[1]))


def load_safe(path: Path) -> set[str]:
    return set(foreign.parse(path)[0])


TOML = """
[run]
name = "run"
[store]
url = "{url}"
[model]
source = "x"
[prompts]
source = "m:f"
[sampling]
max_tokens = 4
[reward]
function = "m:f"
"""


def test_the_hooks_bring_versions_both_ways(
    objects: ObjectStore, base: Path, tmp_path: Path, file_store_settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(TOML.format(url=file_store_settings.url))
    with pytest.raises(UsageError, match="TOWLINE_RUN"):
        miles_hooks.pre_read(str(tmp_path / "host"), 1)
    monkeypatch.setenv("TOWLINE_RUN", str(toml))
    root = tmp_path / "trainer"
    old, new = plain(model()), plain(stepped(model(), 3))
    folder = foreign.publish(root, 1, 0, old, new, "xor", "xxh3-128")
    arguments = SimpleNamespace(hf_checkpoint=str(base))
    monkeypatch.setenv("RANK", "1")
    miles_hooks.publish(arguments, str(folder), [])
    monkeypatch.setenv("RANK", "0")
    miles_hooks.publish(arguments, str(root), [])
    assert list(objects.list("run/")) == []
    miles_hooks.publish(arguments, str(folder), [])
    miles_hooks.publish(arguments, str(folder))
    miles_hooks.pre_read(str(tmp_path / "host"), 1)
    assert same(foreign.apply(tmp_path / "host" / "weight_v000001", old), new)


def test_the_command_follows_until_it_is_told_to_end(
    objects: ObjectStore, base: Path, tmp_path: Path, file_store_settings: StoreSettings
) -> None:
    toml, root = tmp_path / "run.toml", tmp_path / "out"
    toml.write_text(TOML.format(url=file_store_settings.url))
    trainer = Trainer(objects, base)
    trainer.commit()
    once = CliRunner().invoke(app, ["bridge", "miles", str(toml), "--watch", str(root), "--once", "--json"])
    assert (once.exit_code, json.loads(once.stdout)["miles_version"]) == (0, 1), once.output
    wrong = CliRunner().invoke(app, ["bridge", "miles", str(toml), "--watch", str(root), "--encoding", "rot13"])
    assert isinstance(wrong.exception, UsageError)
    copy = tmp_path / "copy.toml"
    copy.write_text(toml.read_text().replace('"run"', '"copy"'))
    into = ["bridge", "miles", str(copy), "--watch", str(root), "--direction", "import", "--base", str(base), "--once", "--json"]
    brought = CliRunner().invoke(app, into)
    assert (brought.exit_code, json.loads(brought.stdout)["version"]) == (0, 2), brought.output
    command = [
        sys.executable,
        "-m",
        "towline.cli.main",
        "bridge",
        "miles",
        str(toml),
        "--watch",
        str(root),
        "--poll-seconds",
        "0.1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        number = trainer.commit()
        give_up = time.monotonic() + 20
        while published(root) != [1, 2] and time.monotonic() < give_up:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, out.split()[:4]) == (0, ["miles_version", "2", "version", str(number)])
    assert same(
        foreign.apply(folder_of(root, 2), foreign.apply(folder_of(root, 1), plain(model()))), plain(trainer.states[number])
    )
