"""What every object store promises, proved of the folder and of a real S3 server alike."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from towline.config import StoreSettings
from towline.errors import ConflictError, MissingError, UsageError
from towline.store.objects import ObjectStore, ensure, open_store


def test_what_was_put_is_read_whole_and_in_chunks(objects: ObjectStore, run_name: str, tmp_path: Path) -> None:
    data = os.urandom(3_500_001)
    objects.put(f"{run_name}/bytes", data)
    assert objects.get(f"{run_name}/bytes") == data
    chunks = list(objects.stream(f"{run_name}/bytes"))
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) <= 1 << 20
    file = tmp_path / "upload"
    file.write_bytes(data)
    objects.put(f"{run_name}/from-file", file)
    assert objects.get(f"{run_name}/from-file") == data
    objects.put(f"{run_name}/bytes", b"")
    assert objects.get(f"{run_name}/bytes") == b""
    assert list(objects.stream(f"{run_name}/bytes")) == []


def test_what_is_not_there_is_missing(objects: ObjectStore, run_name: str) -> None:
    assert objects.stat(f"{run_name}/nothing") is None
    with pytest.raises(MissingError, match=f"{run_name}/nothing"):
        objects.get(f"{run_name}/nothing")
    with pytest.raises(MissingError):
        list(objects.stream(f"{run_name}/nothing"))
    objects.delete(f"{run_name}/nothing")
    assert list(objects.list(f"{run_name}/")) == []


def test_a_create_never_replaces(objects: ObjectStore, run_name: str) -> None:
    key = f"{run_name}/once"
    assert objects.create(key, b"first")
    assert not objects.create(key, b"second")
    assert objects.get(key) == b"first"
    objects.put(key, b"replaced")
    assert objects.get(key) == b"replaced"
    objects.delete(key)
    assert objects.stat(key) is None
    assert objects.create(key, b"again")


def test_of_many_creators_one_wins(objects: ObjectStore, run_name: str) -> None:
    writers, rounds = 4, 4
    with ThreadPoolExecutor(writers) as pool:
        for race in range(rounds):
            gate = threading.Barrier(writers)

            def attempt(writer: int, race: int = race, gate: threading.Barrier = gate) -> bool:
                gate.wait()
                return objects.create(f"{run_name}/race-{race}", b"%d" % writer)

            won = list(pool.map(attempt, range(writers)))
            assert won.count(True) == 1
            assert objects.get(f"{run_name}/race-{race}") == b"%d" % won.index(True)


def test_a_reader_never_sees_half_an_object(objects: ObjectStore, run_name: str) -> None:
    key, sizes = f"{run_name}/whole", (2_000_000, 3_000_000)
    objects.put(key, bytes([0]) * sizes[0])
    done = threading.Event()

    def write() -> None:
        for turn in range(1, 7):
            objects.put(key, bytes([turn % 2]) * sizes[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or reads == 0:
        data = objects.get(key)
        assert data in (bytes([0]) * sizes[0], bytes([1]) * sizes[1])
        reads += 1
    writer.join()


def test_a_listing_has_each_object_under_its_prefix_once(objects: ObjectStore, run_name: str) -> None:
    names = ["a", "a-b", "a.json", "a0", "b/2", "b/1", "b.json", "b0", "b/1-x/part", "bb"]
    for name in names:
        objects.create(f"{run_name}/{name}", name.encode())
    found = sorted(objects.list(f"{run_name}/"), key=lambda item: item.key)
    assert [item.key for item in found] == sorted(f"{run_name}/{name}" for name in names)
    assert [item.size for item in found] == [len(item.key) - len(run_name) - 1 for item in found]
    assert all(abs(item.modified - time.time()) < 60 for item in found)
    for prefix in ("b", "b/", "b/1", "a", "c", "bbx", "a.jsonx"):
        keys = [item.key for item in objects.list(f"{run_name}/{prefix}")]
        assert sorted(keys) == sorted(f"{run_name}/{name}" for name in names if name.startswith(prefix))
    one = objects.stat(f"{run_name}/b/1-x/part")
    assert one == next(item for item in found if item.key.endswith("part"))


def test_prefixes_keep_apart(store_settings: StoreSettings, run_name: str) -> None:
    here = open_store(store_settings.model_copy(update={"url": f"{store_settings.url}/{run_name}-x"}))
    there = open_store(store_settings.model_copy(update={"url": f"{store_settings.url}/{run_name}-y/deep"}))
    here.create("k", b"here")
    assert there.create("k", b"there")
    assert (here.get("k"), there.get("k")) == (b"here", b"there")
    assert [item.key for item in there.list("")] == ["k"]
    assert open_store(store_settings).get(f"{run_name}-y/deep/k") == b"there"


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/", "a b", ".tmp/x", "ä", "-a", "a" * 600])
def test_a_key_that_could_leave_the_prefix_is_refused(objects: ObjectStore, key: str) -> None:
    for act in (lambda: objects.get(key), lambda: objects.create(key, b""), lambda: objects.put(key, b"")):
        with pytest.raises(UsageError, match="object key"):
            act()


def test_ensure_is_idempotent_and_sees_other_bytes(objects: ObjectStore, run_name: str) -> None:
    ensure(objects, f"{run_name}/named", b"same")
    ensure(objects, f"{run_name}/named", b"same")
    assert objects.get(f"{run_name}/named") == b"same"
    with pytest.raises(ConflictError, match=f"{run_name}/named"):
        ensure(objects, f"{run_name}/named", b"other")


def test_a_good_store_passes_the_check_again_and_again(objects: ObjectStore) -> None:
    objects.check()
    objects.check()
    objects.check(writes=False)
