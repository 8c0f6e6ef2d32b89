"""Retention on real stores: what is needed stays, what isn't goes after its grace, and a collector may die anywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from towline.errors import MissingError, UsageError
from towline.store import checkpoints, claims, keys
from towline.store.anchors import record_anchor, upload_anchor
from towline.store.claims import Hold, Pin
from towline.store.collect import Collected, collect, pin, store_time, survey
from towline.store.log import Log
from towline.store.objects import ObjectInfo, ObjectStore
from towline.store.quarantine import quarantine
from towline.store.retention import Rules
from towline.store.versions import materialize

from .models import Run, begun, same, stepped

GRACE = 1000.0
RULES = Rules(grace_seconds=GRACE)


@pytest.fixture
def run(objects: ObjectStore, run_name: str) -> Run:
    return begun(objects, run_name)


def anchor(run: Run, version: int) -> None:
    record_anchor(
        run.objects, run.log.run, upload_anchor(run.objects, run.log.run, version, keys.new_write_id(), run.states[version])
    )


def checkpointed(run: Run) -> int:
    """Commit a version that names a checkpoint."""
    run.log.refresh()
    epoch = run.log.lineage.newest_epoch
    assert epoch is not None
    base, name = run.log.lineage.epoch_head(epoch), keys.new_write_id()
    depth = run.log.lineage.depth(base) + 1
    meta = checkpoints.CheckpointMeta(epoch=epoch, base=base, depth=depth, batch_cursor=0, step=depth, at=0.0)
    checkpoints.save(run.objects, run.log.run, name, {"optimiser.bin": b"state", "rng.bin": b"r"}, meta)
    state = stepped(run.states[base], run.log.next_number)
    return run.commit_staged(run.stage(state, checkpoint=name), state)


def long_run(run: Run) -> None:
    """Versions 2 to 9, with anchors of 4 and 7 and checkpoints at 3, 6 and 8."""
    for number in range(2, 10):
        assert (checkpointed(run) if number in (3, 6, 8) else run.commit()) == number
    for number in (4, 7):
        anchor(run, number)


def passes(objects: ObjectStore, run: Run, times: tuple[float, ...], holds: tuple[Hold, ...] = ()) -> Collected:
    log = Log(objects, run.log.run)
    now = store_time(run.objects, run.log.run)
    done = None
    for later in times:
        done = collect(objects, log, RULES, now=now + later, holds=holds)
    assert done is not None
    return done


def readable(run: Run) -> set[int]:
    found = set()
    log = Log(run.objects, run.log.run)
    log.refresh()
    for version, state in run.states.items():
        try:
            assert same(materialize(run.objects, log, version), state)
            found.add(version)
        except MissingError:
            continue
    return found


def test_nothing_goes_before_its_grace(run: Run) -> None:
    long_run(run)
    everything = {info.key for info in run.objects.list(f"{run.log.run}/")}
    done = passes(run.objects, run, (0.0, GRACE - 30))
    assert done.deleted == 0
    assert {v.thing.version for v in done.plan.of("wait") if v.thing.kind == "version"} == {2, 3, 4}
    assert everything <= {info.key for info in run.objects.list(f"{run.log.run}/")}
    assert readable(run) == set(run.states)


def test_what_is_needed_stays_and_the_rest_goes(run: Run) -> None:
    long_run(run)
    done = passes(run.objects, run, (0.0, GRACE + 60))
    gone = {(v.thing.kind, v.thing.version) for v in done.plan.of("delete")}
    assert gone == {("version", 2), ("version", 3), ("version", 4), ("checkpoint", None)}  # 4 has its anchor
    assert readable(run) == {0, *range(4, 10)} >= set(done.plan.readable)
    log = Log(run.objects, run.log.run)
    log.refresh()
    assert [checkpoints.exists(run.objects, run.log.run, name) for _, name in checkpoints.newest_on(log)] == [True, True, False]
    with pytest.raises(MissingError, match="pin what must stay") as caught:
        materialize(run.objects, log, 3)
    assert caught.value.code == "version_gone"
    assert passes(run.objects, run, (2 * GRACE,)).plan.of("delete") == []


def test_pins_holds_and_forks_keep_their_versions(run: Run) -> None:
    long_run(run)
    run.log.refresh()
    assert pin(run.objects, run.log, Pin(version=2, name="paper"), RULES)
    assert not pin(run.objects, run.log, Pin(version=2, name="paper"), RULES)
    hold = Hold(reader="worker-1", version=3, until=store_time(run.objects, run.log.run) + 3 * GRACE)
    passes(run.objects, run, (0.0, GRACE + 60), (hold,))
    assert {2, 3} <= readable(run)  # 3's deltas to the latest are there too:
    for number in range(4, 10):
        assert run.objects.stat(keys.manifest(run.log.version(number).folder))
    passes(run.objects, run, (3 * GRACE + 60, 5 * GRACE), (hold,))
    assert readable(run) == {0, 2, *range(4, 10)}
    claims.remove_pin(run.objects, run.log.run, 2, "paper")
    with pytest.raises(MissingError, match="no pin"):
        claims.remove_pin(run.objects, run.log.run, 2, "paper")
    run.fork(8)
    passes(run.objects, run, (0.0, GRACE + 60))
    assert readable(run) == {0, *range(4, 9)}  # 9 is off the line now


def test_a_pin_lifts_a_tombstone_in_its_grace_and_comes_too_late_after_it(run: Run) -> None:
    long_run(run)
    passes(run.objects, run, (0.0,))
    now = store_time(run.objects, run.log.run)
    with pytest.raises(MissingError, match="about to be"):
        pin(run.objects, run.log, Pin(version=2, name="late"), RULES, now=now + GRACE + 60)
    assert claims.pins(run.objects, run.log.run) == []
    with pytest.raises(UsageError, match="there is none"):
        pin(run.objects, run.log, Pin(version=1, name="no-version"), RULES)
    with pytest.raises(UsageError, match="letters"):
        pin(run.objects, run.log, Pin(version=2, name="a/b"), RULES)
    assert pin(run.objects, run.log, Pin(version=3, name="in-time"), RULES, now=now + GRACE - 60)
    passes(run.objects, run, (GRACE + 60,))
    assert readable(run) == {0, *range(2, 10)}  # 3 stands on 2


def test_what_can_not_be_committed_any_more_goes_and_what_can_stays(run: Run) -> None:
    run.commit()
    beaten = run.stage(stepped(run.states[2], 50))
    run.commit()
    coming = run.stage(stepped(run.states[3], 51))
    half = keys.version_folder(run.log.run, 1, 2, keys.new_write_id())
    run.objects.put(f"{half}/part-00000.safetensors", b"half")
    lone = f"{keys.checkpoint_folder(run.log.run, 'lone')}/optimiser.bin"
    run.objects.put(lone, b"half")
    run.objects.put(f"{keys.anchor_folder(run.log.run, 3, 'lost')}/model.safetensors", b"half")
    done = passes(run.objects, run, (0.0, GRACE + 60, 2 * GRACE + 120, 4 * GRACE))
    left = {info.key for info in run.objects.list(f"{run.log.run}/")}
    assert not any(key.startswith((beaten.folder, half)) or "/lost/" in key for key in left)
    assert keys.manifest(coming.folder) in left
    assert lone in left  # the newest epoch's trainer may still be uploading it
    assert not [key for key in left if "/tombstones/" in key]  # nothing committed went
    assert run.commit_staged(coming, stepped(run.states[3], 51)) == 4
    time.sleep(1.1)  # some stores' clocks count in seconds
    run.fork(4)
    passes(run.objects, run, (0.0, GRACE + 60))
    assert run.objects.stat(lone) is None
    assert done.plan.lost == {}


def test_quarantine_takes_the_line_back_and_retention_follows(run: Run) -> None:
    long_run(run)
    entry = quarantine(run.log, 8, "the reward was wrong")
    assert entry is not None
    assert (entry.version, quarantine(run.log, 9, "again")) == (8, None)
    assert run.log.lineage.latest == 7
    with pytest.raises(UsageError, match="base model"):
        quarantine(run.log, 0, "no")
    passes(run.objects, run, (0.0, GRACE + 60))
    assert readable(run) == {0, *range(2, 8)}  # the checkpoints of 3 and 6 are the line's newest again


class Dying:
    """A store whose user dies before its n-th change."""

    def __init__(self, real: ObjectStore, changes: int) -> None:
        self.real, self.left = real, changes

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise _Died

    @property
    def url(self) -> str:
        return self.real.url

    def get(self, key: str) -> bytes:
        return self.real.get(key)

    def stream(self, key: str) -> Iterator[bytes]:
        return self.real.stream(key)

    def put(self, key: str, data: bytes | Path) -> None:
        self._change()
        self.real.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._change()
        return self.real.create(key, data)

    def stat(self, key: str) -> ObjectInfo | None:
        return self.real.stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.real.list(prefix)

    def delete(self, key: str) -> None:
        self._change()
        self.real.delete(key)

    def check(self, *, writes: bool = True) -> NoReturn:
        raise NotImplementedError


class _Died(Exception):
    pass


def test_a_collector_that_dies_before_any_change_harms_nothing(run: Run) -> None:
    long_run(run)
    wanted = {0, *range(4, 10)}
    deaths = 0
    for later in (0.0, GRACE + 60, 2 * GRACE + 120):
        for changes in range(100):
            try:
                passes(Dying(run.objects, changes), run, (later,))
                break
            except _Died:
                deaths += 1
                assert wanted <= readable(run)
    assert deaths >= 6
    assert readable(run) == wanted
    log = Log(run.objects, run.log.run)
    log.refresh()
    left = {info.key.rpartition("/")[0] for info in run.objects.list(f"{run.log.run}/versions/")}
    assert left == {log.version(number).folder for number in range(5, 10)}


def test_a_dry_run_changes_nothing_and_says_why(run: Run) -> None:
    long_run(run)
    before = sorted(info.key for info in run.objects.list(f"{run.log.run}/"))
    found = survey(run.objects, run.log, RULES, now=store_time(run.objects, run.log.run))
    assert {v.reason for v in found.of("condemn")} == {
        "before the oldest anchor that stays",
        "older than the 2 newest checkpoints",
    }
    assert [
        key for key in sorted(info.key for info in run.objects.list(f"{run.log.run}/")) if not key.endswith("/clock")
    ] == before


def test_an_incomplete_anchor_is_no_start_to_rely_on(run: Run) -> None:
    long_run(run)
    for info in list(run.objects.list(f"{run.log.run}/anchors/00000007/")):
        run.objects.delete(info.key)
    passes(run.objects, run, (0.0, GRACE + 60))
    assert readable(run) == set(run.states)  # the chain from the base is the second newest anchor's
