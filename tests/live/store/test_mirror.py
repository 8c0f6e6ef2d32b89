"""A mirror of a run's versions: whatever happens on the way, what its LOG names is there and right."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from towline.config import StoreSettings
from towline.errors import ConflictError, CorruptError, UnavailableError
from towline.store import keys
from towline.store.anchors import anchored, record_anchor, upload_anchor
from towline.store.base import base_files
from towline.store.collect import collect
from towline.store.log import Log
from towline.store.materialize import materialize
from towline.store.mirror import Mirror
from towline.store.objects import ObjectStore, open_store
from towline.store.retention import Rules

from . import models


@pytest.fixture
def target(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=(tmp_path / "mirror").as_uri()))


def anchor(run: models.Run, version: int) -> None:
    record = upload_anchor(run.objects, run.log.run, version, keys.new_write_id(), run.states[version])
    record_anchor(run.objects, run.log.run, record)


def read_all(target: ObjectStore, run: models.Run) -> Log:
    """Every version of the line, built from the mirror alone and compared with what was committed."""
    log = Log(target, run.log.run)
    log.refresh()
    for number in log.lineage.path():
        assert models.same(materialize(target, log, number), run.states[number])
    return log


def test_a_mirror_reads_as_its_source_and_takes_what_is_new(objects: ObjectStore, target: ObjectStore, run_name: str) -> None:
    run = models.begun(objects, run_name)
    run.commit()
    run.commit(full=True)
    copy = Mirror(objects, target, run_name)
    first = copy.copy()
    assert (first.entries, first.versions, first.anchors, copy.head) == (4, 2, 1, 3)
    assert base_files(target, read_all(target, run)) == models.OTHERS
    run.commit()
    run.fork(2)
    last = run.commit()
    second = copy.copy()
    assert (second.entries, second.versions, second.anchors) == (3, 2, 0)
    log = read_all(target, run)
    assert log.lineage.latest == last
    assert copy.copy().plain() == dict.fromkeys(first.plain(), 0)
    assert {i.key for i in target.list(keys.log_folder(run_name))} == {i.key for i in objects.list(keys.log_folder(run_name))}


class Breaking:
    """A store whose `calls`-th write, and each one after it, fails; or that hands out other bytes for one key."""

    def __init__(self, objects: ObjectStore, writes: int = 1 << 30, wrong: str = "") -> None:
        self._objects, self._left, self._wrong = objects, writes, wrong
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def _write(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                raise UnavailableError("no more writes", code="test")

    def put(self, key: str, data: bytes | Path) -> None:
        self._write()
        self._objects.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._write()
        return self._objects.create(key, data)

    def stream(self, key: str) -> Iterator[bytes]:
        chunks = b"".join(self._objects.stream(key))
        return iter([chunks[:-1] + bytes([chunks[-1] ^ 1]) if key.endswith(self._wrong or "\0") else chunks])


def test_wherever_it_is_broken_off_what_is_there_can_be_read_and_the_next_pass_ends_it(
    file_store_settings: StoreSettings, tmp_path: Path, run_name: str
) -> None:
    objects = open_store(file_store_settings)
    run = models.begun(objects, run_name)
    run.commit()
    anchor(run, run.commit())
    for writes in range(100):
        target = open_store(StoreSettings(url=(tmp_path / f"mirror-{writes}").as_uri()))
        try:
            Mirror(objects, Breaking(target, writes), run_name).copy()
        except UnavailableError:
            read_all(target, run)
            Mirror(objects, target, run_name).copy()
        else:
            break
        assert read_all(target, run).next_number == run.log.next_number
        assert anchored(target, run_name) == [0, 3]
    assert 10 < writes < 99


def test_bytes_that_are_not_what_their_digest_says_never_get_there(
    file_store_settings: StoreSettings, target: ObjectStore, run_name: str
) -> None:
    objects = open_store(file_store_settings)
    run = models.begun(objects, run_name)
    run.commit()
    with pytest.raises(CorruptError, match="part-00000"):
        Mirror(Breaking(objects, wrong="part-00000.safetensors"), target, run_name).copy()
    log = read_all(target, run)
    assert log.next_number == 2
    assert not list(target.list(keys.versions_folder(run_name)))
    Mirror(objects, target, run_name).copy()
    assert read_all(target, run).next_number == 3


def test_another_log_in_the_target_is_refused(file_store_settings: StoreSettings, target: ObjectStore, run_name: str) -> None:
    objects = open_store(file_store_settings)
    models.begun(objects, run_name)
    other = models.begun(target, run_name)
    before = other.log.head_digest
    with pytest.raises(ConflictError, match="another LOG"):
        Mirror(objects, target, run_name).copy()
    log = Log(target, run_name)
    log.refresh()
    assert log.head_digest == before


def test_what_the_source_gave_up_is_no_obstacle_and_what_the_target_collected_stays_away(
    file_store_settings: StoreSettings, target: ObjectStore, run_name: str
) -> None:
    objects = open_store(file_store_settings)
    run = models.begun(objects, run_name)
    first = run.commit()
    run.commit()
    anchor(run, run.commit())
    folder = run.log.version(first).folder
    for info in list(objects.list(f"{folder}/")):
        objects.delete(info.key)
    done = Mirror(objects, target, run_name).copy()
    assert (done.gone, done.versions, done.anchors) == (1, 2, 2)
    log = Log(target, run_name)
    log.refresh()
    assert models.same(materialize(target, log, 4), run.states[4])

    anchor(run, run.commit())
    copy = Mirror(objects, target, run_name)
    copy.copy()
    log.refresh()
    rules = Rules(grace_seconds=0.0, anchors=1, checkpoints=2)
    collect(target, log, rules)
    collect(target, log, rules)
    left = {info.key for info in target.list(keys.anchors_folder(run_name))}
    assert keys.anchor_record(run_name, 4) not in left, "nothing was collected: the test shows nothing"
    Mirror(objects, target, run_name).copy()
    copy.copy()
    assert {info.key for info in target.list(keys.anchors_folder(run_name))} == left
    assert models.same(materialize(target, log, 5), run.states[5])


def test_the_command_follows_until_it_is_told_to_stop(
    file_store_settings: StoreSettings, target: ObjectStore, run_name: str, tmp_path: Path
) -> None:
    objects = open_store(file_store_settings)
    run = models.begun(objects, run_name)
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'[run]\nname = "{run_name}"\n[bus]\nurl = "nats://127.0.0.1:1"\n[store]\nurl = "{file_store_settings.url}"\n'
        '[model]\nsource = "x"\n[prompts]\nsource = "a:b"\n[sampling]\nmax_tokens = 1\n[reward]\nfunction = "a:b"\n'
    )
    command = [str(Path(sys.executable).parent / "towline"), "store", "mirror", str(toml)]
    process = subprocess.Popen([*command, target.url, "--follow", "--every", "0.1", "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["head"] == 1
        run.commit()
        line = json.loads(process.stdout.readline())
        assert (line["entries"], line["versions"], line["head"]) == (1, 1, 2)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    read_all(target, run)
    refused = subprocess.run([*command, file_store_settings.url], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.split(":")[0]) == (2, "mirror_self")
