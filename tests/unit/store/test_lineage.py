"""The lineage's promises: forks turn the line, quarantine takes descendants along, depth is judged from the line."""

from __future__ import annotations

import pytest

from towline.contract.entries import LogEntry
from towline.errors import InvariantError, MissingError
from towline.store.lineage import Lineage, is_eval_version

from .entries import base, opened, quarantine, version


def lineage(*entries: LogEntry) -> Lineage:
    found = Lineage()
    for entry in entries:
        found.extend(entry)
    return found


FORKED = (
    base(),
    opened(1, 0, 0),
    version(2, 1, 0, 1),
    version(3, 1, 2, 2),
    version(4, 1, 3, 5),
    opened(5, 3, 2),
    version(6, 5, 3, 3),
)


def test_a_log_with_entry_0_alone_serves_it() -> None:
    found = lineage(base())
    assert (found.latest, found.path(), found.newest_epoch, found.depth(0)) == (0, [0], None, 0)
    assert (found.epoch_of(0), found.parent(0), found.chain(0, 0)) == (None, None, [])


def test_an_empty_log_serves_nothing() -> None:
    found = Lineage()
    assert (found.path(), found.versions()) == ([], [])
    with pytest.raises(MissingError, match="entry 0"):
        _ = found.latest


def test_an_open_turns_the_line_back_to_its_base_before_its_first_version() -> None:
    found = lineage(*FORKED[:6])
    assert (found.newest_epoch, found.epoch_base(5), found.epoch_head(5), found.epoch_head(1)) == (5, 3, 3, 4)
    assert (found.latest, found.path()) == (3, [0, 2, 3])
    assert not found.on_line(4)


def test_after_a_fork_off_line_versions_count_from_the_common_ancestor() -> None:
    found = lineage(*FORKED)
    assert found.path() == [0, 2, 3, 6]
    assert [found.on_line(v) for v in found.versions()] == [True, True, True, False, True]
    assert found.common_ancestor(4) == 3
    assert (found.depth(4), found.effective_depth(4)) == (5, 2)
    assert (found.common_ancestor(2), found.effective_depth(2)) == (2, 1)
    assert [found.epoch_of(v) for v in found.versions()] == [None, 1, 1, 1, 5]


def test_a_chain_is_what_must_be_applied() -> None:
    found = lineage(*FORKED)
    assert found.chain(6, 0) == [2, 3, 6]
    assert found.chain(6, 3) == [6]
    assert found.chain(4, 2) == [3, 4]
    for version_, frm in ((6, 4), (2, 3), (4, 6)):
        with pytest.raises(MissingError, match=f"{version_} doesn't stand on {frm}"):
            found.chain(version_, frm)


def test_coalesced_steps_leave_depths_without_a_version() -> None:
    found = lineage(*FORKED[:5])
    assert [found.version_at_depth(d) for d in range(7)] == [0, 2, 3, None, None, 4, None]
    assert [found.version_reaching(d) for d in range(7)] == [0, 2, 3, 4, 4, 4, None]


def test_quarantine_takes_descendants_along_and_the_line_falls_back() -> None:
    found = lineage(*FORKED[:5], quarantine(5, 3))
    assert [found.quarantined(v) for v in (0, 2, 3, 4)] == [False, False, True, True]
    assert (found.latest, found.path(), found.epoch_head(1)) == (2, [0, 2], 4)
    assert (found.effective_depth(4), found.on_line(3)) == (1, False)


def test_quarantine_of_an_off_line_version_leaves_the_line() -> None:
    found = lineage(*FORKED, quarantine(7, 4))
    assert (found.latest, found.path()) == (6, [0, 2, 3, 6])


def test_numbers_have_gaps_and_are_all_listed() -> None:
    assert lineage(*FORKED, quarantine(7, 4)).versions() == [0, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("entries", "entry", "why"),
    [
        ((), opened(0, 0, 0), "entry 0, and no other"),
        ((base(),), base(number=1), "entry 0, and no other"),
        ((base(),), opened(2, 0, 0), "entry 1 comes next"),
        ((base(),), version(1, 0, 0, 1), "epoch 0 where None"),
        (FORKED[:2], opened(2, 1, 0), "base 1 is no version"),
        (FORKED[:3], opened(3, 2, 0), "depth 0 where its base 2 has 1"),
        (FORKED[:6], version(6, 1, 4, 6), "epoch 1 where 5"),
        (FORKED[:6], version(6, 5, 4, 6), "base 4 where the epoch's head is 3"),
        (FORKED[:4], version(4, 1, 2, 2), "base 2 where the epoch's head is 3"),
        (FORKED[:4], version(4, 1, 3, 2), "depth 2 doesn't grow"),
        ((*FORKED[:5], quarantine(5, 3)), version(6, 1, 4, 6), "base 4 is quarantined"),
        ((*FORKED[:5], quarantine(5, 3)), opened(6, 4, 5), "base 4 is quarantined"),
        (FORKED, quarantine(7, 0), "0 can't be quarantined"),
        (FORKED, quarantine(7, 5), "5 can't be quarantined"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused_and_changes_nothing(
    entries: tuple[LogEntry, ...], entry: LogEntry, why: str
) -> None:
    found = lineage(*entries)
    before = (found.next_number, found.path(), found.versions(), found.newest_epoch)
    with pytest.raises(InvariantError, match=why):
        found.extend(entry)
    assert (found.next_number, found.path(), found.versions(), found.newest_epoch) == before


def test_a_number_that_is_no_version_is_missing() -> None:
    found = lineage(*FORKED)
    for ask in (found.depth, found.on_line, found.parent, found.quarantined, found.effective_depth, found.epoch_of):
        with pytest.raises(MissingError, match="no version 5"):
            ask(5)
    with pytest.raises(MissingError, match="no epoch 2"):
        found.epoch_head(2)


def test_eval_versions_are_the_first_past_each_multiple_and_the_last() -> None:
    entries: list[LogEntry] = [base(), opened(1, 0, 0)]
    depths = [1, 4, 5, 6, 9, 11, 14]  # coalesced: 5, 10 are passed by 5 and 11
    for place, depth in enumerate(depths):
        number = place + 2
        entries.append(version(number, 1, number - 1 if place else 0, depth))
    found = lineage(*entries)
    by_depth = {found.depth(v): is_eval_version(found, v, 5, 14) for v in found.versions()}
    assert by_depth == {0: True, 1: False, 4: False, 5: True, 6: False, 9: False, 11: True, 14: True}
    assert not any(is_eval_version(found, v, 0, 14) for v in found.versions())
