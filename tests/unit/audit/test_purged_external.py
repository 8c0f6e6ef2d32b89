"""A CONTROL whose beginning is purged in the middle of an external group: what can't be seen is neither counted nor a fault."""

from __future__ import annotations

from towline.audit.ledger import Ledger
from towline.contract.codec import digest
from towline.contract.control import AdmitRecord, BatchRecord, BatchRow, DropRecord, Record
from towline.contract.groups import EXTERNAL


def admit(group: int, sample: int) -> AdmitRecord:
    return AdmitRecord(writer="w/1", lane=EXTERNAL, group=group, sample=sample, group_size=2)


def ledger_of(*records: Record, begins_at: int) -> Ledger:
    ledger = Ledger()
    for sequence, record in enumerate(records, start=begins_at):
        ledger.read(record, sequence)
    return ledger


ROWS = tuple(BatchRow(-1, sample, sample + 1, digest(b"x"), 0.5, 4, 2) for sample in (0, 1))
BATCH = BatchRecord(writer="w/2", epoch=1, for_depth=4, rows=ROWS, at=0.0)
AWAY = DropRecord(writer="w/3", lane=EXTERNAL, group=-2, samples=0, reason="unpaced", offered=1)


def test_half_of_an_admission_is_no_half_group_where_the_rest_is_purged() -> None:
    cut = ledger_of(admit(-1, 1), BATCH, AWAY, begins_at=100)
    counts = cut.close([])
    assert cut.violations == []
    assert (counts.admitted, counts.turned_away) == (0, {"unpaced": 1})
    whole = ledger_of(admit(-1, 1), begins_at=1)
    whole.close([])
    assert "1 of its 2 samples were admitted" in str(whole.violations[-1])


def test_an_offer_that_was_turned_away_stays_so_in_what_is_left() -> None:
    cut = ledger_of(AWAY, admit(-2, 0), admit(-2, 1), begins_at=100)
    assert any("admitted after its group was closed (unpaced)" in str(fault) for fault in cut.violations)
