"""A task is served by a version of the newest lineage that is deep enough, or by exactly the version it names."""

from __future__ import annotations

from towline.contract.entries import LogEntry
from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.rollout_worker.eligibility import eligibility, stale
from towline.store.lineage import Lineage
from unit.store.entries import base, opened, version


def lineage(*entries: LogEntry) -> Lineage:
    found = Lineage()
    for entry in entries:
        found.extend(entry)
    return found


LINE = lineage(base(), opened(1, 0, 0), version(2, 1, 0, 1), version(3, 1, 2, 2), version(4, 1, 3, 5))
FORKED = lineage(
    base(), opened(1, 0, 0), version(2, 1, 0, 1), version(3, 1, 2, 2), version(4, 1, 3, 5), opened(5, 2, 1), version(6, 5, 2, 2)
)


def task(not_before_depth: int = 0, exact_version: int | None = None) -> Task:
    return Task(
        run="r", lane="train", group=0, sample=0, group_size=1, prompt=pack_tokens([1]), prompt_ref=PromptRef("s", 0, 0),
        cursor=Cursor(0, 1), sampling=SamplingParams(max_tokens=1), seed=0, not_before_depth=not_before_depth,
        exact_version=exact_version, admitted_at=0.0, deadline=0.0,
    )  # fmt: skip


def test_a_task_waits_for_its_depth_on_the_line() -> None:
    assert eligibility(LINE, 2, task(1)) == "serve"
    assert eligibility(LINE, 2, task(2)) == "wait"
    assert eligibility(LINE, 4, task(4)) == "serve"
    assert eligibility(LINE, None, task(0)) == "wait"


def test_a_version_off_the_line_serves_nothing_however_deep() -> None:
    assert eligibility(FORKED, 4, task(2)) == "wait"
    assert eligibility(FORKED, 6, task(2)) == "serve"


def test_an_exact_version_is_served_by_it_alone() -> None:
    assert eligibility(LINE, 3, task(exact_version=3)) == "serve"
    assert eligibility(LINE, 2, task(exact_version=3)) == "wait"
    assert eligibility(LINE, None, task(exact_version=3)) == "wait"
    assert eligibility(LINE, 4, task(exact_version=3)) == "moved"
    assert eligibility(LINE, 4, task(exact_version=9)) == "wait", "this reader of the LOG may be behind"
    assert eligibility(FORKED, 6, task(exact_version=4)) == "moved", "a fork took it off the line"
    assert eligibility(FORKED, 4, task(exact_version=6)) == "wait"


def test_staleness_counts_in_depths_of_the_log_and_from_the_common_ancestor() -> None:
    assert not stale(LINE, 4, 0)
    assert stale(LINE, 3, 2)
    assert not stale(LINE, 3, 3)
    assert not stale(FORKED, 4, 1), "version 4 counts from version 2, depth 1"
    assert stale(FORKED, 4, 0)
