"""Which batches are the line's, over forks; and where the records lie that may concern a sample."""

from __future__ import annotations

from towline.bus.client import Message
from towline.bus.topology import Topology
from towline.contract.codec import encode
from towline.contract.control import (
    BatchRecord,
    BatchRow,
    CancelRecord,
    DropRecord,
    EndRecord,
    EvalRecord,
    EvalRow,
    ForkRecord,
)
from towline.contract.entries import BaseEntry, OpenEntry, VersionEntry
from towline.store.lineage import Lineage
from towline.view.decisions import MOST_GROUPS, Decisions, line_epochs, subjects
from towline.view.samples import SampleIndex

TOPOLOGY = Topology("r")


class Told:
    """Records in CONTROL's order, told to a `Decisions`."""

    def __init__(self) -> None:
        self.decisions, self.sequence = Decisions(SampleIndex(64)), 0

    def tell(self, record) -> int:
        self.sequence += 1
        self.decisions.take(Message("towline.r.control.x", self.sequence, encode(record), {}, 1.0))
        return self.sequence

    def batch(self, epoch: int, depth: int, *sequences: int) -> int:
        rows = tuple(BatchRow(1, 0, sequence, b"", 0.5, depth, 3) for sequence in sequences)
        return self.tell(BatchRecord(writer="w/1", epoch=epoch, for_depth=depth, rows=rows, at=1.0))


def lineage_of(*entries: tuple[str, int, int]) -> Lineage:
    """After entry 0: ("open", base, depth) and ("version", base, depth) entries."""
    lineage = Lineage()
    base = {"prev": None, "write_id": "x", "at": 0.0}
    lineage.extend(BaseEntry(number=0, source="", revision=None, anchor="", layout_digest="", model_digest="", **base))
    for number, (kind, on, depth) in enumerate(entries, start=1):
        common = base | {"number": number, "base": on, "base_digest": "", "depth": depth, "batch_cursor": 0, "checkpoint": None}
        if kind == "open":
            lineage.extend(OpenEntry(**common))
            continue
        lineage.extend(
            VersionEntry(
                epoch=lineage.newest_epoch or 0, skipped=(), representation="delta", codec="", folder="", manifest_digest="",
                layout_digest="", model_digest="", density=0.0, wire_bytes=1, model_bytes=1, step=1, probe=None,
                encode_seconds=0.0, upload_seconds=0.0, verify_seconds=0.0, **common,
            )
        )  # fmt: skip
    return lineage


def test_the_line_has_each_depths_batch_of_the_epoch_that_it_went_through_and_those_to_come():
    told = Told()
    for depth in range(4):
        told.batch(1, depth, depth)
    told.tell(ForkRecord(writer="w/2", epoch=5, base=3, depth=2))
    for depth in (2, 3, 4, 5):
        told.batch(5, depth, depth + 10)
    # versions 2, 3, 4 of epoch 1 have the depths 1, 2, 3; entry 5 forks at version 3; version 6 takes two steps at once
    lineage = lineage_of(
        ("open", 0, 0), ("version", 0, 1), ("version", 2, 2), ("version", 3, 3), ("open", 3, 2), ("version", 3, 4)
    )  # fmt: skip
    depths = line_epochs(lineage)
    assert depths == {1: (0, 2), 5: (2, 4)}
    found = [(one.epoch, one.point.depth) for one in told.decisions.line(lineage, depths)]
    assert found == [(1, 0), (1, 1), (5, 2), (5, 3), (5, 4), (5, 5)]


def test_without_a_log_every_batch_shows():
    told = Told()
    told.batch(1, 1, 1)
    told.batch(1, 0, 2)
    assert [one.point.depth for one in told.decisions.line(Lineage(), {})] == [0, 1]


def test_what_may_concern_a_sample_is_found_again():
    told = Told()
    first = told.batch(1, 0, 3, 4, 5)
    told.batch(1, 1, 8, 9)
    drop = told.tell(DropRecord(writer="w/1", lane="train", group=7, samples=2, reason="stale"))
    told.tell(DropRecord(writer="w/1", lane="train", group=8, samples=2, reason="stale"))
    cancel = told.tell(CancelRecord(writer="w/1", group=7, sample=0, task_sequence=40, reason="reissued"))
    fork = told.tell(ForkRecord(writer="w/1", epoch=5, base=0, depth=0))
    row = EvalRow(9, 0, 20, b"", 1.0)
    told.tell(EvalRecord(writer="w/1", version=2, depth=1, wanted=1, rows=(row,), mean=1.0))
    assert told.decisions.concerning(7, 4, [41]) == sorted([first, drop, cancel, 40, 41, fork])
    assert told.decisions.concerning(99, None, []) == [fork]


def test_an_end_holds_until_a_fork_goes_below_it():
    told = Told()
    told.tell(EndRecord(writer="w/1", reason="steps", depth=9))
    told.tell(ForkRecord(writer="w/1", epoch=5, base=0, depth=9))
    assert told.decisions.ended is not None
    told.tell(ForkRecord(writer="w/1", epoch=6, base=0, depth=4))
    assert told.decisions.ended is None


def test_what_is_kept_of_drops_is_bounded_and_a_broken_record_is_passed_over():
    told = Told()
    for group in range(MOST_GROUPS + 5):
        told.decisions.dropped[group] = group
    told.tell(DropRecord(writer="w/1", lane="train", group=-1, samples=1, reason="stale"))
    assert len(told.decisions.dropped) == MOST_GROUPS
    assert -1 in told.decisions.dropped
    told.decisions.take(Message("towline.r.control.x", 9, b"\xff", {}, 1.0))
    assert told.decisions.drops == {"stale": 1}


def test_tasks_are_not_among_what_is_read():
    assert not any(".task" in subject for subject in subjects(TOPOLOGY))
    assert "towline.r.control.batch" in subjects(TOPOLOGY)
