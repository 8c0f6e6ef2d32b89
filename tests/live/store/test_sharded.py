"""Versions and checkpoints that several writers stage side by side, each its own tensors or files."""

from __future__ import annotations

import pytest

from towline.delta.state import ModelState
from towline.errors import InvariantError, MissingError
from towline.publisher.verify import check_sent
from towline.store import checkpoints, keys
from towline.store.log import Log
from towline.store.manifest import Manifest, VersionFacts, read_manifest
from towline.store.objects import ObjectStore
from towline.store.versions import Shard, materialize, write_manifest, write_shard

from .models import Run, begun, same, stepped

META = checkpoints.CheckpointMeta(epoch=1, base=0, depth=1, batch_cursor=10, step=1, at=0.0)


@pytest.fixture
def run(objects: ObjectStore, run_name: str) -> Run:
    return begun(objects, run_name)


def parts(state: ModelState, owners: int) -> list[ModelState]:
    names = sorted(state)
    return [{name: state[name] for name in names[owner::owners]} for owner in range(owners)]


def stage(run: Run, state: ModelState, owners: int, *, twice: str | None = None) -> Manifest:
    write_id, base = keys.new_write_id(), run.states[0]
    folder = keys.version_folder(run.log.run, 1, 0, write_id)
    shards: list[Shard] = []
    for number, mine in enumerate(parts(state, owners)):
        if twice is not None:
            mine[twice] = state[twice]
        old = {name: base[name] for name in mine}
        shards.append(write_shard(run.objects, folder, number, base_state=old, new_state=mine, prove=True))
    facts = VersionFacts(depth=1, step=1, batch_cursor=10)
    return write_manifest(run.objects, run.log.run, epoch=1, base=0, write_id=write_id, shards=shards, facts=facts)


@pytest.mark.parametrize("owners", [2, 3, 6], ids=["two", "three", "more than tensors"])
def test_what_several_writers_stage_comes_back_bit_for_bit(run: Run, owners: int) -> None:
    state = stepped(run.states[0], 7)
    manifest = stage(run, state, owners)
    alone = run.stage(state)
    assert (manifest.model_digest, manifest.layout_digest, manifest.density) == (
        alone.model_digest, alone.layout_digest, alone.density,
    )  # fmt: skip
    assert read_manifest(run.objects, manifest.folder, manifest.digest) == manifest
    check_sent(run.objects, manifest)
    number = run.commit_staged(manifest, state)
    log = Log(run.objects, run.log.run)
    log.refresh()
    assert same(materialize(run.objects, log, number), state)


def test_a_version_that_lacks_one_writers_part_is_refused(run: Run) -> None:
    manifest = stage(run, stepped(run.states[0], 7), 2)
    run.objects.delete(f"{manifest.folder}/{manifest.parts[-1].name}")
    with pytest.raises(MissingError):
        check_sent(run.objects, manifest)


def test_a_tensor_that_two_writers_stage_is_named(run: Run) -> None:
    with pytest.raises(InvariantError, match=r"model\.norm\.weight"):
        stage(run, stepped(run.states[0], 7), 2, twice="model.norm.weight")


def test_part_names_tell_which_part_is_missing() -> None:
    first, second = keys.part_name(0, 1), keys.part_name(1, 1)
    assert keys.lacking_part([first, second, keys.part_name(0, 3)]) is None
    assert keys.lacking_part([second]) == keys.part_name(0, 1)
    assert keys.lacking_part([first, keys.part_name(1, 0)]) == second
    assert keys.lacking_part([keys.part_name(0), keys.part_name(2)]) == keys.part_name(1)


def test_a_checkpoint_of_several_writers_is_read_file_by_file(objects: ObjectStore, run_name: str) -> None:
    records = [record for file in ({"a": b"1"}, {"b": b"22"}) for record in checkpoints.save_files(objects, run_name, "c", file)]
    assert not checkpoints.exists(objects, run_name, "c")
    checkpoints.seal(objects, run_name, "c", records, META)
    files, meta = checkpoints.open_files(objects, run_name, "c")
    assert meta == META
    objects.delete(f"{keys.checkpoint_folder(run_name, 'c')}/a")
    assert (list(files), files["b"]) == (["a", "b"], b"22")
    with pytest.raises(MissingError):
        files["a"]


def test_a_checkpoint_file_that_two_writers_store_is_named(objects: ObjectStore, run_name: str) -> None:
    records = [record for _ in range(2) for record in checkpoints.save_files(objects, run_name, "c", {"a": b"1"})]
    with pytest.raises(InvariantError, match="'a'"):
        checkpoints.seal(objects, run_name, "c", records, META)
