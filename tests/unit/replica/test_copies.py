"""A host's copies: made once and shared, verified by whoever opens one, never half of anything, within their budget."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.worker.world import World
from towline import faults
from towline.delta.files import read_safetensors
from towline.errors import CorruptError, MissingError, UnavailableError, UsageError
from towline.replica.host import HostBusyError, HostCopies
from towline.replica.host_record import HostRecord
from towline.replica.making import CopyMaker
from unit.engine.models import digest_of

RUN = "copies"


class Crash(BaseException):
    """Where a process would have died."""


class Host:
    """A world with three versions after the base model, and makers that share a folder of it."""

    def __init__(self, folder: Path) -> None:
        self.world = World(None, folder, RUN)  # type: ignore[arg-type]
        self.world.seed()
        self.versions = [self.world.commit(seed) for seed in (1, 2, 3)]
        self.folder = folder / "host"
        self.size = sum(tensor.spec.nbytes for tensor in self.world.states[0].values())

    def maker(self, copies: int = 0, *, keeps: bool = False) -> CopyMaker:
        """As a process of its own would have it. `copies`: what the budget holds, 0 for none."""
        host = HostCopies(self.folder, RUN)
        return CopyMaker(host, self.world.objects, budget_bytes=copies * self.size, threads=1, keeps=keeps)

    @property
    def record(self) -> HostRecord:
        return HostCopies(self.folder, RUN).record()

    def files(self, pattern: str = "v*.safetensors") -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))

    def assert_holds(self, version: int, state: Any) -> None:
        assert digest_of(state) == digest_of(self.world.states[version])

    def part_of(self, version: int) -> Path:
        entry = self.world.log.version(version)
        return self.world.folder / "store" / entry.folder / "part-00000.safetensors"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Have the next passing of a fault point end the call, as a kill would."""

    def arm(name: str | None) -> None:
        def point(reached: str) -> None:
            if reached == name:
                raise Crash(name)

        monkeypatch.setattr(faults, "point", point)

    return arm


@pytest.mark.parametrize("copies", [0, 1, 2, 3])
def test_each_version_is_had_exactly_and_the_files_keep_to_the_budget(host: Host, copies: int) -> None:
    maker = host.maker(copies)
    for version in [0, *host.versions]:
        taken = maker.take(host.world.log, version)
        host.assert_holds(version, taken.copy.state)
        assert taken.wire_bytes == (host.world.log.version(version).wire_bytes if version else 0)
        assert taken.in_place == (copies == 1)
        assert len(host.files()) <= (copies or 2)
        taken.copy.release()
    assert host.files("*.tmp") == []


def test_a_copy_that_is_there_is_shared_and_costs_nothing_more(host: Host) -> None:
    version = host.versions[0]
    first = host.maker().take(host.world.log, version)
    second = host.maker().take(host.world.log, version)
    assert (first.wire_bytes > 0, second.wire_bytes) == (True, 0)
    assert first.copy.path == second.copy.path
    assert host.files() == [f"v{version:08d}.safetensors"]


def test_a_copy_in_use_keeps_its_bytes_while_others_come_and_go(host: Host) -> None:
    maker = host.maker()
    held = maker.take(host.world.log, 0)
    for version in host.versions:
        maker.take(host.world.log, version).copy.release()
    host.assert_holds(0, held.copy.state)
    assert "v00000000.safetensors" in host.files(), "it's in use"
    held.copy.release()
    maker.take(host.world.log, host.versions[0]).copy.release()
    assert len(host.files()) == 2


def test_one_prepares_at_a_time_and_the_next_takes_over_when_it_is_gone(host: Host) -> None:
    one, other = HostCopies(host.folder, RUN), HostCopies(host.folder, RUN)
    with one.preparing():
        with pytest.raises(HostBusyError, match="another replica of this host prepares"), other.preparing():
            pass
        with pytest.raises(HostBusyError):
            host.maker().take(host.world.log, 0)
    host.maker().take(host.world.log, 0)


def test_many_that_want_a_version_at_once_get_it_from_one_download(host: Host) -> None:
    version, taken = host.versions[2], []

    def take() -> None:
        maker = host.maker()
        while True:
            try:
                taken.append(maker.take(host.world.log, version))
                return
            except HostBusyError:
                continue

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(bool(one.wire_bytes) for one in taken) == [False] * 5 + [True]
    for one in taken:
        host.assert_holds(version, one.copy.state)


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize("point", ["copy_begun", "copy_partly", "copy_written", "copy_recorded"])
def test_a_crash_at_any_step_leaves_the_old_version_or_the_new_one(
    host: Host, copies: int, point: str, crash_at: Callable[[str | None], None]
) -> None:
    old, new = host.versions[:2]
    host.maker(copies).take(host.world.log, old).copy.release()
    crash_at(f"replica.{point}")
    with pytest.raises(Crash):
        host.maker(copies).take(host.world.log, new)
    crash_at(None)
    # Only what the record calls good may be opened, and it is.
    for copy in host.record.copies:
        if copy.state == "good":
            host.assert_holds(copy.version, read_safetensors(host.folder / copy.file))
    for version in (old, new) if point != "copy_recorded" or copies == 0 else (new, old):
        taken = host.maker(copies).take(host.world.log, version)
        host.assert_holds(version, taken.copy.state)
        taken.copy.release()
    assert host.files("*.tmp") == []


def test_a_crash_half_way_in_place_is_put_back_without_a_download(host: Host, crash_at: Callable[[str | None], None]) -> None:
    old, new = host.versions[0], host.versions[2]
    host.maker(1).take(host.world.log, old).copy.release()
    crash_at("replica.copy_partly")
    with pytest.raises(Crash):
        host.maker(1).take(host.world.log, new)
    crash_at(None)
    [copy] = host.record.copies
    assert copy.state == "changing"
    assert digest_of(read_safetensors(host.folder / copy.file)) != digest_of(host.world.states[old])
    (host.world.folder / "store").rename(host.world.folder / "away")
    host.assert_holds(old, host.maker(1).take(host.world.log, old).copy.state)


def test_a_lost_journal_makes_the_copy_be_made_anew(host: Host, crash_at: Callable[[str | None], None]) -> None:
    old, new = host.versions[:2]
    host.maker(1).take(host.world.log, old).copy.release()
    crash_at("replica.copy_partly")
    with pytest.raises(Crash):
        host.maker(1).take(host.world.log, new)
    crash_at(None)
    for journal in host.folder.glob("*.undo"):
        journal.unlink()
    host.assert_holds(old, host.maker(1).take(host.world.log, old).copy.state)


def test_in_place_the_version_before_comes_back_from_the_journal(host: Host) -> None:
    old, new = host.versions[0], host.versions[2]
    maker = host.maker(1)
    maker.take(host.world.log, old).copy.release()
    taken = maker.take(host.world.log, new)
    assert taken.changed_from == old
    assert taken.changed is not None
    differing = {
        name for name, tensor in host.world.states[new].items()
        if not np.array_equal(tensor.data, host.world.states[old][name].data)
    }  # fmt: skip
    assert differing <= taken.changed
    taken.copy.release()
    (host.world.folder / "store").rename(host.world.folder / "away")
    host.assert_holds(old, maker.take(host.world.log, old).copy.state)


def test_in_place_a_copy_that_is_being_read_is_waited_for(host: Host) -> None:
    maker = host.maker(1)
    reader = maker.take(host.world.log, 0)
    with pytest.raises(HostBusyError, match="still reading version 0"):
        host.maker(1).take(host.world.log, host.versions[0])
    host.assert_holds(0, reader.copy.state)
    reader.copy.release()
    host.assert_holds(host.versions[0], host.maker(1).take(host.world.log, host.versions[0]).copy.state)


@pytest.mark.parametrize("copies", [0, 1])
def test_a_fork_goes_back_and_on_along_the_other_branch(host: Host, copies: int) -> None:
    maker = host.maker(copies)
    maker.take(host.world.log, host.versions[2]).copy.release()
    host.world.open(host.versions[0])
    other = host.world.commit(7)
    taken = maker.take(host.world.log, other)
    host.assert_holds(other, taken.copy.state)


@pytest.mark.parametrize("copies", [0, 1])
def test_a_corrupt_part_is_named_and_what_was_there_stays_good(host: Host, copies: int) -> None:
    old, new = host.versions[:2]
    maker = host.maker(copies)
    maker.take(host.world.log, old).copy.release()
    part = host.part_of(new)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(CorruptError, match=r"part-00000|version|digest"):
        maker.take(host.world.log, new)
    still = host.maker(copies).take(host.world.log, old)
    host.assert_holds(old, still.copy.state)
    still.copy.release()
    part.unlink()
    with pytest.raises(MissingError):
        host.maker(copies).take(host.world.log, new)
    assert host.record.good(new, host.world.log.version(new).model_digest) is None


def test_a_missing_anchor_is_said_where_there_is_no_other_start(host: Host) -> None:
    shutil.rmtree(host.world.folder / "store" / RUN / "anchors")
    with pytest.raises((MissingError, UnavailableError)):
        host.maker().take(host.world.log, host.versions[2])
    assert host.record.copies == ()


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "record"])
def test_a_copy_that_was_damaged_while_nobody_looked_is_made_anew(host: Host, damage: str) -> None:
    version = host.versions[1]
    host.maker().take(host.world.log, version).copy.release()
    path = host.folder / f"v{version:08d}.safetensors"
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 9)
    elif damage == "gone":
        path.unlink()
    else:
        (host.folder / "copies.json").write_text("{")
    taken = host.maker().take(host.world.log, version)
    assert taken.wire_bytes > 0
    host.assert_holds(version, taken.copy.state)


def test_what_nobody_knows_of_is_cleared_away(host: Host) -> None:
    host.maker().take(host.world.log, 0).copy.release()
    for name in ("123.tmp", "v00000099.safetensors", "v1-0-1.undo"):
        (host.folder / name).write_bytes(b"half")
    host.maker().take(host.world.log, host.versions[0])
    assert host.files("*") == ["copies.json", "preparer.lock", "v00000000.safetensors", f"v{host.versions[0]:08d}.safetensors"]


def test_a_budget_holds_before_there_is_a_version_after_the_base_model(tmp_path: Path) -> None:
    world = World(None, tmp_path, RUN)  # type: ignore[arg-type]
    world.seed()
    size = sum(tensor.spec.nbytes for tensor in world.states[0].values())
    for budget, in_place in ((size, True), (2 * size, False)):
        maker = CopyMaker(HostCopies(tmp_path / "host", RUN), world.objects, budget_bytes=budget, threads=1, keeps=False)
        assert maker.take(world.log, 0).in_place == in_place
    small = CopyMaker(HostCopies(tmp_path / "host", RUN), world.objects, budget_bytes=size - 1, threads=1, keeps=False)
    with pytest.raises(UsageError, match=rf"set it to {size} or more"):
        small.take(world.log, 0)


def test_a_budget_without_room_says_what_it_takes(host: Host) -> None:
    small = CopyMaker(HostCopies(host.folder, RUN), host.world.objects, budget_bytes=host.size - 1, threads=1, keeps=False)
    with pytest.raises(UsageError, match=rf"set it to {host.size} or more"):
        small.take(host.world.log, 0)
    with pytest.raises(UsageError, match=rf"needs a second one to restart from.*set it to {2 * host.size} or more"):
        host.maker(1, keeps=True).take(host.world.log, host.versions[0])
    maker = host.maker(2)
    held = [maker.take(host.world.log, version) for version in host.versions[:2]]
    with pytest.raises(HostBusyError, match="2 copies are in use"):
        maker.take(host.world.log, host.versions[2])
    held[0].copy.release()
    host.assert_holds(host.versions[2], maker.take(host.world.log, host.versions[2]).copy.state)
