"""Versions come back bit for bit, from the cheapest copy, and a wrong byte anywhere is named instead of used."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from towline.delta.state import copy_state
from towline.errors import CorruptError, MissingError, UsageError
from towline.store import keys
from towline.store.anchors import load_anchor, read_anchor, record_anchor, upload_anchor
from towline.store.log import Log
from towline.store.manifest import read_manifest
from towline.store.materialize import plan
from towline.store.objects import ObjectStore
from towline.store.versions import materialize

from .faulty import Faulty
from .models import Run, begun, model, same, stepped


@pytest.fixture
def run(objects: ObjectStore, run_name: str) -> Run:
    """Versions 2, 3 and 4 in epoch 1."""
    run = begun(objects, run_name)
    for _ in range(3):
        run.commit()
    return run


def reader(run: Run) -> Log:
    log = Log(run.objects, run.log.run)
    log.refresh()
    return log


def test_every_version_comes_back_bit_for_bit(run: Run) -> None:
    log = reader(run)
    for version, state in run.states.items():
        assert same(materialize(run.objects, log, version), state)


def test_what_a_reader_has_is_the_start_and_stays_as_it_is(run: Run) -> None:
    counting = Faulty(run.objects)
    log = Log(counting, run.log.run)
    log.refresh()
    have = copy_state(run.states[3])
    counting.gets.clear()
    assert same(materialize(counting, log, 4, (3, have)), run.states[4])
    assert same(have, run.states[3])
    assert not any("anchors/00000000/" in key or f"-{0:08d}-" in key for key in counting.gets)
    assert materialize(counting, log, 3, (3, have)) is have
    assert same(materialize(counting, log, 4, (2, copy_state(run.states[2])), in_place=True), run.states[4])


def test_a_copy_from_which_no_chain_leads_is_no_start(run: Run) -> None:
    run.fork(2)
    on_fork = run.commit()
    log = reader(run)
    assert same(materialize(run.objects, log, on_fork, (4, run.states[4])), run.states[on_fork])
    assert same(materialize(run.objects, log, 4, (on_fork, run.states[on_fork])), run.states[4])


def test_a_bad_copy_is_left_for_a_good_one(run: Run) -> None:
    bad = stepped(run.states[3], 99)
    assert same(materialize(run.objects, reader(run), 4, (3, bad)), run.states[4])
    with pytest.raises(CorruptError, match="isn't version 3"):
        materialize(run.objects, reader(run), 3, (3, bad))


def test_an_anchor_is_the_start_where_it_is_cheaper(run: Run) -> None:
    anchor = upload_anchor(run.objects, run.log.run, 4, keys.new_write_id(), run.states[4], shard_bytes=2000)
    with pytest.raises(MissingError):
        read_anchor(run.objects, run.log.run, 4)
    assert record_anchor(run.objects, run.log.run, anchor) == anchor
    assert len(anchor.weights) > 1
    assert same(load_anchor(run.objects, anchor), run.states[4])
    run.commit()
    log = reader(run)
    assert [start.kind for start in plan(run.objects, log, 5)] == ["anchor"]  # no hint names the other yet
    log.write_hint(anchors=[4])
    starts = list(plan(run.objects, log, 5, have=3))
    assert [(s.kind, s.chain) for s in starts] == [("own", (4, 5)), ("anchor", (5,)), ("anchor", (2, 3, 4, 5))]
    for key in [item.key for item in run.objects.list(f"{run.log.run}/versions/00000001-00000000-")]:
        run.objects.delete(key)  # the base's chain is gone: the anchor is what is left
    assert same(materialize(run.objects, log, 5), run.states[5])


def test_a_second_anchor_of_a_version_gives_way_to_the_first(run: Run) -> None:
    first, second = (upload_anchor(run.objects, run.log.run, 3, keys.new_write_id(), run.states[3]) for _ in range(2))
    assert record_anchor(run.objects, run.log.run, first) == first
    assert record_anchor(run.objects, run.log.run, second) == first


def test_a_gone_anchor_or_a_bad_one_is_left_for_the_chain(run: Run) -> None:
    anchor = record_anchor(
        run.objects, run.log.run, upload_anchor(run.objects, run.log.run, 4, keys.new_write_id(), run.states[4])
    )
    log = reader(run)
    log.write_hint(anchors=[2, 4, 77])
    run.objects.put(f"{anchor.folder}/model.safetensors", b"junk")
    assert same(materialize(run.objects, log, 4), run.states[4])
    run.objects.delete(f"{anchor.folder}/model.safetensors")
    assert same(materialize(run.objects, log, 4), run.states[4])
    run.objects.put(keys.anchor_record(run.log.run, 4), b"{")
    assert same(materialize(run.objects, log, 4), run.states[4])


def test_a_full_representation_needs_nothing_before_it(run: Run) -> None:
    number = run.commit(full=True)
    last = run.commit()
    log = reader(run)
    assert log.version(number).representation == "full"
    for item in list(run.objects.list(f"{run.log.run}/anchors/")):
        run.objects.delete(item.key)
    assert same(materialize(run.objects, log, last), run.states[last])
    with pytest.raises(MissingError):
        materialize(run.objects, log, 4)


def test_a_batch_that_changed_nothing_is_an_empty_delta(run: Run) -> None:
    number = run.commit(copy_state(run.states[4]))
    log = reader(run)
    assert log.version(number).density == 0.0
    assert log.version(number).model_digest == log.version(4).model_digest
    assert same(materialize(run.objects, log, number), run.states[4])


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-5], lambda data: data + b"x", lambda data: b""])
def test_a_wrong_part_is_named(run: Run, damage: Callable[[bytes], bytes]) -> None:
    log = reader(run)
    part = f"{log.version(3).folder}/part-00000.safetensors"
    run.objects.put(part, damage(run.objects.get(part)))
    with pytest.raises(CorruptError, match=f"version 3.*{part}|{part}"):
        materialize(run.objects, log, 4)
    assert same(materialize(run.objects, log, 2), run.states[2])


def test_a_part_that_is_not_here_yet_is_missing_not_corrupt(run: Run) -> None:
    log = reader(run)
    part = f"{log.version(3).folder}/part-00000.safetensors"
    run.objects.delete(part)
    with pytest.raises(MissingError, match=part):
        materialize(run.objects, log, 4)


def test_a_manifest_of_another_version_is_refused(run: Run) -> None:
    log = reader(run)
    entry = log.version(4)
    key = keys.manifest(entry.folder)
    good = run.objects.get(key)
    for wrong in (run.objects.get(keys.manifest(log.version(3).folder)), good[:-1], b"{}"):
        run.objects.put(key, wrong)
        with pytest.raises(CorruptError, match=key):
            materialize(run.objects, log, 4, (3, run.states[3]))
    run.objects.put(key, good)
    assert read_manifest(run.objects, entry.folder, entry.manifest_digest).digest == entry.manifest_digest


def test_a_staged_version_can_be_proved_by_its_writer_and_written_again(run: Run) -> None:
    new = stepped(run.states[4], 5)
    manifest = run.stage(new, write_id="w", prove=True)
    assert manifest.proved
    assert not run.stage(new).proved
    assert run.objects.get(keys.manifest(manifest.folder))
    assert read_manifest(run.objects, manifest.folder, manifest.digest) == manifest
    assert manifest.facts.depth == 4


def test_a_delta_needs_the_layout_of_its_base(run: Run) -> None:
    with pytest.raises(UsageError, match="another layout"):
        run.stage(model(rows=97))
