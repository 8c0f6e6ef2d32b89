"""The LOG on both kinds of store: one winner an entry, lost replies settled, every reader sees the same sealed chain."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from towline.config import StoreSettings
from towline.contract.entries import LogEntry, OpenEntry, VersionEntry, decode_entry, encode_entry, entry_digest
from towline.errors import CorruptError, FencedError, InvariantError, MissingError, UnavailableError
from towline.store import keys, packs
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store

from . import logs
from .faulty import Faulty, lose, once


@pytest.fixture
def log(objects: ObjectStore, run_name: str) -> Log:
    """Entry 0 and epoch 1."""
    log = Log(objects, run_name)
    log.append(logs.base())
    log.append(logs.opened())
    return log


def test_entries_are_dense_sealed_and_read_by_others(log: Log, objects: ObjectStore) -> None:
    for _ in range(3):
        log.append(logs.version())
    log.append(logs.opened(base=3))
    log.append(logs.version())
    other = Log(objects, log.run)
    assert [e.number for e in other.refresh()] == list(range(7))
    assert other.refresh() == []
    assert other.lineage.path() == [0, 2, 3, 6]
    stored = [objects.get(keys.log_entry(log.run, n)) for n in range(7)]
    for number in range(1, 7):
        assert decode_entry(stored[number], number).prev == entry_digest(stored[number - 1]) == other.digest(number - 1)
    log.append(logs.version())
    assert [e.number for e in other.refresh()] == [7]
    assert other.find(log.entry(7).write_id) == log.entry(7)
    assert other.find("nobody's") is None


def test_of_racing_writers_each_gets_an_entry_of_its_own(log: Log, objects: ObjectStore) -> None:
    writers, each = 3, 3
    gate = threading.Barrier(writers)

    def write(_: int) -> list[LogEntry]:
        mine = Log(objects, log.run)
        gate.wait()
        return [mine.append(logs.opened()) for _ in range(each)]

    with ThreadPoolExecutor(writers) as pool:
        written = [entry for entries in pool.map(write, range(writers)) for entry in entries]
    log.refresh()
    assert sorted(e.number for e in written) == list(range(2, 2 + writers * each))
    assert all(log.entry(e.number) == e for e in written)
    assert log.next_number == 2 + writers * each


def test_who_loses_an_entry_decides_everything_anew(log: Log, objects: ObjectStore) -> None:
    """The trainer's `open` wins the number that the publisher's last commit wanted: the publisher must give up."""
    slow = Faulty(objects)
    slow.before_create = once(lambda key: log.append(logs.opened()))
    publisher, seen = Log(slow, log.run), []

    def build(log: Log) -> LogEntry:
        seen.append((log.next_number, log.lineage.newest_epoch))
        if log.lineage.newest_epoch != 1:
            raise FencedError("epoch 1 is over")
        return logs.version(epoch=1)(log)

    with pytest.raises(FencedError):
        publisher.append(build)
    assert seen == [(2, 1), (3, 2)]
    log.refresh()
    assert [type(e).__name__ for e in log.entries()] == ["BaseEntry", "OpenEntry", "OpenEntry"]


def test_the_other_way_round_the_open_is_built_on_the_commit_that_won(log: Log, objects: ObjectStore) -> None:
    slow = Faulty(objects)
    slow.before_create = once(lambda key: log.append(logs.version()))
    entry = Log(slow, log.run).append(logs.opened())
    assert isinstance(entry, OpenEntry)
    assert (entry.number, entry.base, entry.depth) == (3, 2, 1)


def test_a_lost_reply_of_a_put_that_landed_is_success(log: Log, objects: ObjectStore) -> None:
    lossy = Faulty(objects)
    lossy.after_create = lose
    writer = Log(lossy, log.run)
    entry = writer.append(logs.version(write_id="mine"))
    assert (entry.number, entry.write_id) == (2, "mine")
    assert len(lossy.creates) == 1
    log.refresh()
    assert log.next_number == 3


def test_a_lost_put_is_sent_again(log: Log, objects: ObjectStore) -> None:
    lossy = Faulty(objects)
    lossy.before_create = once(lose)
    assert Log(lossy, log.run).append(logs.version(write_id="mine")).number == 2
    log.refresh()
    assert [log.entry(2).write_id, log.next_number] == ["mine", 3]


def test_a_lost_reply_of_a_put_that_another_beat_is_a_loss(log: Log, objects: ObjectStore) -> None:
    lossy = Faulty(objects)

    def beaten(key: str) -> None:
        log.append(logs.version(write_id="theirs"))
        lose(key)

    lossy.before_create = once(beaten)
    entry = Log(lossy, log.run).append(logs.version(write_id="mine"))
    log.refresh()
    assert (entry.number, [log.entry(n).write_id for n in (2, 3)]) == (3, ["theirs", "mine"])


def test_a_store_that_stays_away_leaves_it_open_and_a_repeat_settles_it(log: Log, objects: ObjectStore) -> None:
    lossy = Faulty(objects)
    lossy.after_create = lose
    lossy.change[keys.log_entry(log.run, 2)] = lambda data: lose("read")
    writer = Log(lossy, log.run)
    with pytest.raises(UnavailableError):
        writer.append(logs.version(write_id="mine"))
    restarted = Log(objects, log.run)
    assert restarted.append(logs.version(write_id="mine")).number == 2
    assert restarted.next_number == 3


def test_the_same_write_is_never_entered_twice(log: Log, objects: ObjectStore) -> None:
    first = log.append(logs.version(write_id="w"))
    log.append(logs.version())
    assert log.append(logs.version(write_id="w")) == first
    assert Log(objects, log.run).append(logs.version(write_id="w")) == first
    log.refresh()
    assert log.next_number == 4


def test_two_publishers_of_one_write_get_one_entry(log: Log, objects: ObjectStore) -> None:
    slow, other = Faulty(objects), Log(objects, log.run)
    slow.before_create = once(lambda key: other.append(logs.version(write_id="w", verify_seconds=2.0)))
    entry = Log(slow, log.run).append(logs.version(write_id="w", verify_seconds=1.0))
    assert isinstance(entry, VersionEntry)
    assert entry.verify_seconds == 2.0  # as it is stored, not as this one would have had it
    log.refresh()
    assert log.next_number == 3


def test_an_entry_that_breaks_a_rule_is_never_written(log: Log) -> None:
    for build in (logs.version(epoch=0), logs.quarantine(0), logs.quarantine(7), logs.version(depth=0)):
        with pytest.raises((InvariantError, MissingError)):
            log.append(build)
    with pytest.raises(CorruptError, match="stands on another entry 0"):
        log.append(logs.version(base_digest="other"))
    with pytest.raises(InvariantError, match="built on another head"):
        log.append(logs.version(prev="other"))
    log.refresh()
    assert log.next_number == 2


def test_a_changed_entry_breaks_the_chain_for_every_reader(log: Log, objects: ObjectStore) -> None:
    entry = log.append(logs.version())
    log.append(logs.version())
    assert isinstance(entry, VersionEntry)
    forged = encode_entry(logs.version(write_id=entry.write_id, model_digest="forged")(_at(objects, log.run, 2)))
    objects.put(keys.log_entry(log.run, 2), forged)
    with pytest.raises(CorruptError, match="log entry 3 follows another entry 2"):
        Log(objects, log.run).refresh()
    objects.put(keys.log_entry(log.run, 2), objects.get(keys.log_entry(log.run, 1)))
    with pytest.raises(CorruptError, match="log entry 2 says schema 1, number 1"):
        Log(objects, log.run).refresh()
    objects.put(keys.log_entry(log.run, 2), b'{"half')
    with pytest.raises(CorruptError, match="log entry 2 can't be read"):
        Log(objects, log.run).refresh()


def _at(objects: ObjectStore, run: str, count: int) -> Log:
    """The LOG as a reader has it who has seen `count` entries."""
    later = Faulty(objects)

    def gone(data: bytes) -> bytes:
        raise MissingError("not yet")

    later.change[keys.log_entry(run, count)] = gone
    log = Log(later, run)
    log.refresh()
    return log


@pytest.mark.parametrize("number", [0, 2, 90, 400])
def test_a_hint_that_is_behind_or_ahead_is_only_a_hint(log: Log, objects: ObjectStore, number: int) -> None:
    for _ in range(4):
        log.append(logs.version())
    objects.put(keys.head_hint(log.run), b'{"number":%d}' % number)
    assert len(Log(objects, log.run).refresh()) == 6


@pytest.mark.parametrize("junk", [b"", b"{", b'{"number":"x"}', b"\xff"])
def test_a_hint_that_cannot_be_read_is_ignored(log: Log, objects: ObjectStore, junk: bytes) -> None:
    objects.put(keys.head_hint(log.run), junk)
    assert len(Log(objects, log.run).refresh()) == 2


def test_the_hint_names_the_head_and_the_newest_anchors(log: Log, objects: ObjectStore) -> None:
    log.write_hint(anchors=[9, 1, 5, 7, 3])
    hint = Log(objects, log.run).read_hint()
    assert hint is not None
    assert (hint.number, hint.anchors) == (1, (3, 5, 7, 9))


def test_a_poll_that_finds_nothing_new_costs_one_request(log: Log, objects: ObjectStore) -> None:
    counting = Faulty(objects)
    reader = Log(counting, log.run)
    reader.refresh()
    counting.gets.clear()
    reader.refresh()
    assert counting.gets == [keys.log_entry(log.run, 2)]


@pytest.fixture
def packed(log: Log, objects: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Log:
    """21 entries, of which the first 16 stand in two packs."""
    monkeypatch.setattr(packs, "ENTRIES", 8)
    while log.next_number < 21:
        log.append(logs.version())
        if log.next_number % 8 == 0:
            log.write_hint()
    log.write_hint()
    assert objects.stat(keys.log_pack(log.run, 1)) is not None
    assert objects.stat(keys.log_pack(log.run, 2)) is None
    return log


def test_a_new_reader_of_a_long_log_asks_for_packs(packed: Log, objects: ObjectStore) -> None:
    counting = Faulty(objects)
    other = Log(counting, packed.run)
    assert other.refresh() == packed.entries()
    assert [other.digest(number) for number in range(21)] == [packed.digest(number) for number in range(21)]
    entries = sorted(key for key in counting.gets if key.endswith(".json") and "/log/" in key)
    # The last one of each pack, those after the packs, and the one that isn't there yet.
    assert entries == [keys.log_entry(packed.run, number) for number in (7, 15, 16, 17, 18, 19, 20, 21)]


def test_a_publisher_that_was_away_makes_the_packs_that_are_missing(packed: Log, objects: ObjectStore) -> None:
    for number in range(2):
        objects.delete(keys.log_pack(packed.run, number))
    other = Log(objects, packed.run)
    other.refresh()
    for number in range(2):
        other.write_hint()
        assert objects.stat(keys.log_pack(packed.run, number)) is not None
    assert Log(objects, packed.run).refresh() == packed.entries()


@pytest.mark.parametrize("spoil", ["junk", "short", "changed", "another", "gone"])
def test_a_pack_that_isnt_the_logs_own_is_ignored(packed: Log, objects: ObjectStore, spoil: str) -> None:
    key = keys.log_pack(packed.run, 0)
    stored = [objects.get(keys.log_entry(packed.run, number)) for number in range(16)]
    changed = encode_entry(msgspec.structs.replace(packed.entry(3), at=1.0))
    other = {
        "junk": b"\xc1", "short": packs.encode_pack(stored[:7]), "another": packs.encode_pack(stored[8:16]),
        "changed": packs.encode_pack([*stored[:3], changed, *stored[4:8]]),
    }  # fmt: skip
    objects.delete(key)
    if spoil in other:
        objects.put(key, other[spoil])
    assert Log(objects, packed.run).refresh() == packed.entries()


def test_a_pack_that_is_ahead_of_a_mirrors_entries_is_only_a_pack(packed: Log, objects: ObjectStore) -> None:
    for number in range(12, 21):
        objects.delete(keys.log_entry(packed.run, number))
    assert Log(objects, packed.run).refresh() == packed.entries()[:12]


def test_runs_in_one_bucket_keep_apart(log: Log, objects: ObjectStore) -> None:
    other = Log(objects, f"{log.run}-b")
    assert other.refresh() == []
    with pytest.raises(MissingError, match="no entry 0"):
        other.entry(0)


def test_a_new_process_reads_what_a_process_wrote_before_it_died(tmp_path: Path) -> None:
    settings = StoreSettings(url=(tmp_path / "s").as_uri())
    Log(open_store(settings), "r").append(logs.base(write_id="w"))
    leftovers = list((tmp_path / "s").rglob(".tmp/*"))
    assert leftovers == []
    assert Log(open_store(settings), "r").refresh()[0].write_id == "w"
