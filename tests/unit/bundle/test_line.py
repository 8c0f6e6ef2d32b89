"""Which batches made the line, and where a replay can begin."""

from __future__ import annotations

import pytest

from towline.bundle.line import BatchAt, checkpoint_of, replay_start, steps
from towline.config import StoreSettings
from towline.contract.control import BatchRecord, BatchRow
from towline.contract.entries import encode_entry, entry_digest
from towline.errors import MissingError
from towline.store import keys
from towline.store.log import Log
from towline.store.objects import open_store
from unit.store.entries import base, opened, version


def batch(epoch, depth, sequence):
    row = BatchRow(0, 0, 10 * sequence, bytes(16), 1.0, depth, 1)
    return BatchAt(BatchRecord(writer="w/1", epoch=epoch, for_depth=depth, rows=(row,), at=0.0), sequence)


@pytest.fixture
def log(tmp_path):
    """Epoch 1 makes depths 1, 3 (two steps) and 4; epoch 5 forks at version 3 (depth 3) and makes 4 and 5."""
    objects = open_store(StoreSettings(url=tmp_path.as_uri()))
    made = [
        base(), opened(1, 0, 0), version(2, 1, 0, 1), version(3, 1, 2, 3, checkpoint="c3"), version(4, 1, 3, 4),
        opened(5, 3, 3), version(6, 5, 3, 4), version(7, 5, 6, 5, checkpoint="c7"),
    ]  # fmt: skip
    digests: list[str] = []
    for entry in made:
        fields = {"prev": digests[-1]} if digests else {}
        if entry.number:
            fields["base_digest"] = digests[entry.base]
        data = encode_entry(type(entry)(**{**{f: getattr(entry, f) for f in entry.__struct_fields__}, **fields}))
        objects.put(keys.log_entry("small", entry.number), data)
        digests.append(entry_digest(data))
    log = Log(objects, "small")
    log.refresh()
    return log


BATCHES = {(b.record.epoch, b.record.for_depth): b for b in [
    batch(1, 0, 1), batch(1, 1, 2), batch(1, 2, 3), batch(1, 3, 4), batch(5, 3, 6), batch(5, 4, 7),
]}  # fmt: skip


def test_coalesced_steps_and_a_forks_own_batches_are_followed(log):
    found = [(s.entry.number, [b.sequence for b in s.batches], s.lost) for s in steps(log, BATCHES)]
    assert found == [(2, [1], ()), (3, [2, 3], ()), (6, [6], ()), (7, [7], ())]
    assert [(s.entry.number, [b.sequence for b in s.batches]) for s in steps(log, BATCHES, 3, 6)] == [(6, [6])]
    # The abandoned branch can be asked for, too.
    assert [s.entry.number for s in steps(log, BATCHES, 3, 4)] == [4]


def test_a_lost_batch_is_named(log):
    left = {key: value for key, value in BATCHES.items() if key != (1, 2)}
    assert [(s.entry.number, s.lost) for s in steps(log, left) if s.lost] == [(3, (2,))]


@pytest.mark.parametrize(("first_kept", "start"), [(1, 0), (11, 3), (31, 3), (60, 3), (61, 7), (71, 7)])
def test_a_replay_starts_at_the_oldest_checkpoint_after_what_was_purged(log, first_kept, start):
    """Rows stand at 10 times their batch's sequence. Purging the first batch's row leaves version 3's checkpoint, and so on."""
    assert replay_start(log, BATCHES, first_kept) == start


def test_a_version_without_a_checkpoint_is_no_start(log):
    assert (checkpoint_of(log, 0), checkpoint_of(log, 7)) == (None, "c7")
    with pytest.raises(MissingError, match=r"version 6 has no checkpoint; .*: 3, 7"):
        checkpoint_of(log, 6)


def test_a_checkpoint_that_retention_took_is_no_start(log):
    assert replay_start(log, BATCHES, 11, lambda name: name != "c3") == 7
    assert replay_start(log, BATCHES, 11, lambda name: False) is None
    assert replay_start(log, BATCHES, 1, lambda name: False) == 0
