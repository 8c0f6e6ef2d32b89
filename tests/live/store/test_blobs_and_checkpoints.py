"""Blobs are what their digest says; a checkpoint is whole or isn't there, and counts once a version on the line names it."""

from __future__ import annotations

import os

import pytest

from towline.contract.codec import digest
from towline.errors import CorruptError, MissingError
from towline.store import checkpoints, keys
from towline.store.blobs import Blobs
from towline.store.checkpoints import CheckpointMeta
from towline.store.log import Log
from towline.store.objects import ObjectStore

from . import logs
from .faulty import Faulty

META = CheckpointMeta(epoch=1, base=2, depth=3, batch_cursor=40, step=6, at=1.5)


def test_a_blob_is_found_under_its_digest_and_stored_once(objects: ObjectStore, run_name: str) -> None:
    blobs, data = Blobs(objects, run_name), os.urandom(2_000_000)
    name = blobs.put(data)
    assert name == digest(data)
    assert blobs.put(data) == name
    assert Blobs(objects, run_name).get(name) == data
    assert [item.key for item in objects.list(f"{run_name}/blobs/")] == [f"{run_name}/blobs/{name.hex()}"]


def test_a_blob_that_is_gone_or_changed_is_never_given_out(objects: ObjectStore, run_name: str) -> None:
    blobs = Blobs(objects, run_name)
    name = blobs.put(b"payload")
    objects.put(keys.blob(run_name, name), b"another")
    with pytest.raises(CorruptError, match=name.hex()):
        blobs.get(name)
    objects.delete(keys.blob(run_name, name))
    with pytest.raises(MissingError, match=name.hex()):
        blobs.get(name)


def test_a_checkpoint_comes_back_whole(objects: ObjectStore, run_name: str) -> None:
    files = {"model.pt": os.urandom(500_000), "optimizer.pt": os.urandom(1_500_000), "rng.json": b"{}"}
    checkpoints.save(objects, run_name, "c1", files, META)
    checkpoints.save(objects, run_name, "c1", files, META)
    assert checkpoints.exists(objects, run_name, "c1")
    assert checkpoints.load(objects, run_name, "c1") == (files, META)


def test_a_checkpoint_without_its_manifest_is_not_there(objects: ObjectStore, run_name: str) -> None:
    dying = Faulty(objects)

    def die(key: str) -> None:
        raise KeyboardInterrupt

    dying.before_create = die
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(dying, run_name, "c1", {"model.pt": b"x"}, META)
    assert not checkpoints.exists(objects, run_name, "c1")
    with pytest.raises(MissingError, match="c1"):
        checkpoints.load(objects, run_name, "c1")


def test_a_damaged_checkpoint_names_the_file(objects: ObjectStore, run_name: str) -> None:
    checkpoints.save(objects, run_name, "c1", {"a": b"1", "b": b"2"}, META)
    checkpoints.save(objects, run_name, "c2", {"a": b"1"}, META)
    objects.put(f"{run_name}/checkpoints/c1/b", b"3")
    with pytest.raises(CorruptError, match="checkpoints/c1/b"):
        checkpoints.load(objects, run_name, "c1")
    objects.put(f"{run_name}/checkpoints/c1/manifest.json", objects.get(f"{run_name}/checkpoints/c2/manifest.json"))
    with pytest.raises(CorruptError, match=r"c1/manifest\.json says schema 1, 'c2'"):
        checkpoints.load(objects, run_name, "c1")


def test_only_checkpoints_on_the_line_count_newest_first(objects: ObjectStore, run_name: str) -> None:
    log = Log(objects, run_name)
    for build in (logs.base(), logs.opened(), logs.version(checkpoint="a"), logs.version(), logs.version(checkpoint="b")):
        log.append(build)
    assert list(checkpoints.newest_on(log)) == [(4, "b"), (2, "a")]
    log.append(logs.opened(base=3))
    log.append(logs.version(checkpoint="c"))
    assert list(checkpoints.newest_on(log)) == [(6, "c"), (2, "a")]
    log.append(logs.quarantine(6))
    assert list(checkpoints.newest_on(log)) == [(2, "a")]
