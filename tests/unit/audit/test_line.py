"""The auditor's reading of the LOG agrees with the services' lineage, though it shares no code with it."""

from __future__ import annotations

import random

import pytest

from towline.audit.line import Line
from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, QuarantineEntry, VersionEntry
from towline.store.lineage import Lineage


def grow(seed: int, length: int = 40) -> tuple[list[LogEntry], Lineage]:
    """A LOG of random opens, versions that consume one to three batches, and quarantines."""
    choose, lineage = random.Random(seed), Lineage()
    entries: list[LogEntry] = [
        BaseEntry(
            number=0, prev=None, write_id="w", at=0, source="m", revision=None, anchor="a", layout_digest="l", model_digest="m"
        )
    ]
    lineage.extend(entries[0])
    while len(entries) < length:
        number, epoch = len(entries), lineage.newest_epoch
        entry: LogEntry
        head = None if epoch is None else lineage.epoch_head(epoch)
        if epoch is None or head is None or choose.random() < 0.15 or lineage.quarantined(head):
            base = choose.choice(lineage.path()[-4:])
            entry = OpenEntry(number=number, prev="p", write_id="w", at=0, base=base, base_digest="d", depth=lineage.depth(base),
                              batch_cursor=0, checkpoint=None)  # fmt: skip
        elif choose.random() < 0.08 and head != 0:
            entry = QuarantineEntry(number=number, prev="p", write_id="w", at=0, version=head, reason="r")
        else:
            depth = lineage.depth(head) + choose.randint(1, 3)
            entry = VersionEntry(
                number=number, prev="p", write_id="w", at=0, epoch=epoch, base=head, base_digest="d", depth=depth, skipped=(),
                representation="delta", codec="c", folder="f", manifest_digest="m", layout_digest="l", model_digest="m",
                density=0, wire_bytes=0, model_bytes=0, step=0, batch_cursor=number, checkpoint=None, probe=None,
                encode_seconds=0, upload_seconds=0, verify_seconds=0,
            )  # fmt: skip
        lineage.extend(entry)
        entries.append(entry)
    return entries, lineage


@pytest.mark.parametrize("seed", range(30))
def test_both_readings_agree(seed: int) -> None:
    entries, lineage = grow(seed)
    line = Line(entries)
    assert line.latest == lineage.latest
    assert list(reversed(line.ancestors(lineage.latest))) == lineage.path()
    assert line.depths == {version: lineage.depth(version) for version in lineage.versions()}
    consumed = line.consumed()
    assert len(consumed) == lineage.depth(lineage.latest)
    for depth, epoch in enumerate(consumed):
        reached = lineage.version_reaching(depth + 1)
        assert reached is not None
        assert lineage.epoch_of(reached) == epoch
    epoch = lineage.newest_epoch
    assert epoch is not None
    if not lineage.quarantined(lineage.epoch_head(epoch)):
        for version in lineage.versions():
            assert line.judged(version, epoch) == (lineage.effective_depth(version), lineage.on_line(version))


def test_an_empty_log_has_no_line() -> None:
    line = Line([])
    assert line.latest is None
    assert line.consumed() == []
