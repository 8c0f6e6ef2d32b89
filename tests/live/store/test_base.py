"""Entry 0: the base model comes back bit for bit; one seeder wins and another model is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from towline.contract.entries import BaseEntry, Probe
from towline.delta.files import load_folder, save_folder
from towline.delta.state import model_digest, tensor_digests
from towline.errors import ConflictError, CorruptError, MissingError
from towline.store import keys
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.store.versions import base_files, fetch_base_folder, seed_base, seed_base_state

from .models import OTHERS, model, same

PROBE = Probe(tokens=(1, 2, 3), logprobs=(-1.0, -2.0), tolerance=1e-3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    save_folder(model(), folder)
    for name, data in (OTHERS | {".hidden": b"no", "pytorch_model.bin": b"no", "chat_template.jinja": b"{{x}}"}).items():
        (folder / name).write_bytes(data)
    (folder / "sub").mkdir()
    return folder


def test_a_seeded_folder_comes_back_whole_from_the_store_alone(
    objects: ObjectStore, run_name: str, folder: Path, tmp_path: Path
) -> None:
    entry = seed_base(objects, Log(objects, run_name), folder, "org/model", "abc123", PROBE)
    assert (entry.source, entry.revision, entry.probe) == ("org/model", "abc123", PROBE)
    reader, target = Log(objects, run_name), tmp_path / "fetched"
    fetch_base_folder(objects, reader, target)
    assert same(load_folder(target), model())
    assert entry.model_digest == model_digest(tensor_digests(load_folder(target)))
    expected = OTHERS | {"chat_template.jinja": b"{{x}}"}
    assert sorted(p.name for p in target.iterdir()) == sorted([*expected, "model.safetensors"])
    assert base_files(objects, reader) == expected
    (target / "config.json").write_bytes(b"damaged")
    before = (target / "model.safetensors").stat().st_ino
    fetch_base_folder(objects, reader, target)
    assert (target / "config.json").read_bytes() == OTHERS["config.json"]
    assert (target / "model.safetensors").stat().st_ino == before


def test_seeding_again_compares_and_uploads_nothing(objects: ObjectStore, run_name: str, folder: Path) -> None:
    first = seed_base(objects, Log(objects, run_name), folder, "s", None, None)
    before = [(item.key, item.modified) for item in objects.list(f"{run_name}/")]
    assert seed_base(objects, Log(objects, run_name), folder, "elsewhere", None, PROBE) == first
    assert [(item.key, item.modified) for item in objects.list(f"{run_name}/")] == before


@pytest.mark.parametrize(("other", "what"), [(model(seed=1), "weights"), (model(rows=95), "layout")])
def test_another_model_is_refused(objects: ObjectStore, run_name: str, other: dict[str, object], what: str) -> None:
    seed_base_state(objects, Log(objects, run_name), model(), OTHERS, "s", None, None)
    with pytest.raises(ConflictError, match=rf"its {what} differ.*run\.name"):
        seed_base_state(objects, Log(objects, run_name), other, OTHERS, "s", None, None)  # type: ignore[arg-type]


def test_of_two_seeders_one_wins_and_both_agree(objects: ObjectStore, run_name: str) -> None:
    gate = threading.Barrier(3)

    def seed(_: int) -> BaseEntry:
        gate.wait()
        return seed_base_state(objects, Log(objects, run_name), model(), OTHERS, "s", None, None)

    with ThreadPoolExecutor(3) as pool:
        entries = list(pool.map(seed, range(3)))
    assert len({e.write_id for e in entries}) == 1
    assert entries[0].anchor.startswith(f"{run_name}/anchors/00000000/")
    log = Log(objects, run_name)
    log.refresh()
    assert log.entries() == [entries[0]]
    assert base_files(objects, log) == OTHERS


def test_a_seeder_that_died_before_entry_0_is_followed_by_one_that_uses_its_upload(objects: ObjectStore, run_name: str) -> None:
    seed_base_state(objects, Log(objects, run_name), model(), OTHERS, "s", None, None)
    objects.delete(keys.log_entry(run_name, 0))  # as if it had died between the anchor and the entry
    uploaded = sorted(item.key for item in objects.list(f"{run_name}/anchors/"))
    entry = seed_base_state(objects, Log(objects, run_name), model(), OTHERS, "s", None, None)
    assert sorted(item.key for item in objects.list(f"{run_name}/anchors/")) == uploaded
    assert {key for key in uploaded if not key.startswith(f"{entry.anchor}/")} == {keys.anchor_record(run_name, 0)}
    objects.delete(keys.log_entry(run_name, 0))
    with pytest.raises(ConflictError, match="another model"):
        seed_base_state(objects, Log(objects, run_name), model(seed=1), OTHERS, "s", None, None)


def test_a_damaged_base_is_named_and_never_written(objects: ObjectStore, run_name: str, tmp_path: Path) -> None:
    log = Log(objects, run_name)
    with pytest.raises(MissingError, match="no entry 0"):
        base_files(objects, log)
    entry = seed_base_state(objects, log, model(), OTHERS, "s", None, None)
    objects.put(f"{entry.anchor}/config.json", b"{}")
    with pytest.raises(CorruptError, match=f"{entry.anchor}/config.json"):
        base_files(objects, log)
    with pytest.raises(CorruptError, match=r"config\.json"):
        fetch_base_folder(objects, log, tmp_path / "f")
    assert not (tmp_path / "f" / "config.json").exists()
