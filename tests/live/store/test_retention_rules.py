"""Each rule of retention by itself, where only that rule keeps a thing or lets it go."""

from __future__ import annotations

import pytest

from towline.config import StoreSettings
from towline.errors import MissingError
from towline.store import checkpoints, claims, keys
from towline.store.anchors import read_anchor, upload_anchor
from towline.store.claims import Hold, Pin
from towline.store.collect import Collected, _delete, collect, pin, store_time, survey
from towline.store.log import Log
from towline.store.objects import open_store
from towline.store.quarantine import quarantine
from towline.store.retention import Plan, Stock, Thing, plan
from towline.store.stock import take_stock
from towline.store.versions import materialize

from .models import Run, begun, same, stepped
from .test_retention import GRACE, RULES, anchor, checkpointed, passes, readable


@pytest.fixture
def run(file_store_settings: StoreSettings, run_name: str) -> Run:
    return begun(open_store(file_store_settings), run_name)


def now(run: Run) -> float:
    return store_time(run.objects, run.log.run)


def found(run: Run, later: float = 0.0, holds: tuple[Hold, ...] = ()) -> Plan:
    run.log.refresh()
    return survey(run.objects, run.log, RULES, now=now(run) + later, holds=holds)


def fate(run: Run, folder: str, later: float = 0.0) -> str:
    (verdict,) = [v for v in found(run, later).verdicts if v.thing.folder.startswith(folder)]
    return verdict.action


def test_the_chain_of_the_older_of_two_anchors_stays_without_anyone_else_wanting_it(run: Run) -> None:
    for _ in range(8):
        run.commit()
    for number in (4, 7):
        anchor(run, number)
    passes(run.objects, run, (0.0, GRACE + 60, 3 * GRACE))
    assert readable(run) == {0, *range(4, 10)}
    left = found(run)
    assert (left.readable[0], left.readable[9], left.lost) == ("the base model", "the latest version", {})
    with pytest.raises(MissingError) as gone:  # its tombstone outlives its folder
        materialize(run.objects, run.log, 3)
    assert gone.value.code == "version_gone"


def test_a_pin_keeps_its_versions_checkpoint_too(run: Run) -> None:
    pinned = checkpointed(run)
    for _ in range(3):
        checkpointed(run)
    name = run.log.version(pinned).checkpoint
    assert name is not None
    pin(run.objects, run.log, Pin(version=pinned, name="paper"), RULES)
    passes(run.objects, run, (0.0, GRACE + 60))
    assert checkpoints.exists(run.objects, run.log.run, name)
    claims.remove_pin(run.objects, run.log.run, pinned, "paper")
    passes(run.objects, run, (0.0, GRACE + 60))
    assert not checkpoints.exists(run.objects, run.log.run, name)


def test_a_full_representation_is_a_start(run: Run) -> None:
    for _ in range(3):
        run.commit()
    run.commit(full=True)
    run.commit()
    hold = Hold(reader="r", version=6, until=now(run) + GRACE)
    assert found(run, holds=(hold,)).lost == {}
    run.objects.delete(run.log.version(3).folder + "/manifest.json")  # below the full one: nothing needs it
    assert found(run).lost == {}


def test_what_is_needed_again_loses_its_tombstone(run: Run) -> None:
    for _ in range(8):
        run.commit()
    for number in (4, 7):
        anchor(run, number)
    passes(run.objects, run, (0.0,))
    hold = Hold(reader="late", version=2, until=now(run) + 9 * GRACE)
    assert passes(run.objects, run, (GRACE + 60,), (hold,)).lifted == 3
    assert not list(run.objects.list(keys.tombstones_folder(run.log.run)))
    assert {2, 3, 4} <= readable(run)


def test_a_stage_goes_with_its_base_and_stays_for_an_epoch_that_is_not_known_yet(run: Run) -> None:
    run.commit()
    staged = run.stage(stepped(run.states[2], 9)).folder
    assert fate(run, staged) == "keep"
    unknown = keys.version_folder(run.log.run, 99, 2, keys.new_write_id())
    run.objects.put(f"{unknown}/part-00000.safetensors", b"x")
    assert fate(run, unknown, 9 * GRACE) == "keep"
    quarantine(run.log, 2, "bad")
    assert fate(run, staged) == "condemn"


def test_an_upload_that_began_before_the_newest_epoch_goes_whatever_came_later(run: Run) -> None:
    lone = keys.checkpoint_folder(run.log.run, "lone")
    thing = Thing(kind="checkpoint", folder=lone, keys=(), nbytes=1, oldest=10.0, newest=30.0, complete=False)
    verdicts = [plan(run.log, Stock(things=[thing], opened_at=at), RULES, 40.0).verdicts[0].action for at in (5.0, 20.0, None)]
    assert verdicts == ["keep", "condemn", "keep"]


def test_an_anchor_on_its_way_is_left_alone_for_the_grace_and_is_no_start(run: Run) -> None:
    for _ in range(3):
        run.commit()
    record = upload_anchor(run.objects, run.log.run, 3, keys.new_write_id(), run.states[3])
    assert fate(run, record.folder, GRACE - 60) == "keep"
    assert fate(run, record.folder, GRACE + 60) == "condemn"
    run.objects.delete(keys.manifest(run.log.version(2).folder))
    assert 4 in found(run).lost  # nothing but an anchor that nobody recorded leads there


def test_damage_is_not_garbage(run: Run) -> None:
    for _ in range(8):
        run.commit()
    for number in (4, 7):
        anchor(run, number)
    (part,) = [i.key for i in run.objects.list(run.log.version(2).folder) if "part-" in i.key]
    run.objects.delete(part)
    for file in read_anchor(run.objects, run.log.run, 0).files[:1]:
        run.objects.delete(f"{read_anchor(run.objects, run.log.run, 0).folder}/{file.name}")
    passes(run.objects, run, (0.0, GRACE + 60, 3 * GRACE))
    assert run.objects.stat(keys.manifest(run.log.version(2).folder)) is not None
    assert run.objects.stat(keys.anchor_record(run.log.run, 0)) is not None


def test_a_folder_whose_tombstone_was_lifted_meanwhile_is_spared(run: Run) -> None:
    run.commit()
    folder = run.log.version(2).folder
    (thing,) = [t for t in take_stock(run.objects, run.log).things if t.folder == folder]
    done = Collected(found(run))
    _delete(run.objects, run.log.run, thing, done)
    assert (done.spared, done.deleted) == ([folder], 0)
    assert run.objects.stat(keys.manifest(folder)) is not None


def test_an_expired_hold_is_cleared_a_grace_later(run: Run) -> None:
    run.commit()
    claims.put_hold(run.objects, run.log.run, Hold(reader="r", version=2, until=now(run) + 10))
    for later, left in ((0.0, 1), (100.0, 1), (GRACE, 1), (GRACE + 60, 0)):
        collect(run.objects, Log(run.objects, run.log.run), RULES, now=now(run) + later)
        assert len(claims.holds(run.objects, run.log.run)) == left


def test_a_reader_whose_chain_vanished_resolves_again_by_anchors_that_no_hint_names(run: Run) -> None:
    for _ in range(4):
        run.commit()
    anchor(run, 4)
    run.log.write_hint([])
    for number in (2, 3, 4):
        run.objects.delete(keys.manifest(run.log.version(number).folder))
    assert same(materialize(run.objects, run.log, 5), run.states[5])
    assert same(materialize(run.objects, run.log, 5, (2, run.states[2])), run.states[5])  # its own copy leads nowhere now
