"""Whether a version may serve a task, and whether a sample can still be trained: by the LOG's lineage alone."""

from __future__ import annotations

from typing import Literal

from towline.contract.task import Task
from towline.store.lineage import Lineage


def eligibility(lineage: Lineage, version: int | None, task: Task) -> Literal["serve", "wait", "moved"]:
    """`wait`: a later version may serve it; `moved`: its exact version isn't served and is none of those to come."""
    if task.exact_version is not None:
        if version == task.exact_version:
            return "serve"
        return "wait" if version is None or _is_ahead(lineage, version, task.exact_version) else "moved"
    if version is None or not lineage.on_line(version) or lineage.depth(version) < task.not_before_depth:
        return "wait"
    return "serve"


def stale(lineage: Lineage, version_start: int, max_staleness: int) -> bool:
    """Whether a sample that began on `version_start` is too old for the next batch already."""
    return lineage.depth(lineage.latest) > lineage.effective_depth(version_start) + max_staleness


def _is_ahead(lineage: Lineage, version: int, wanted: int) -> bool:
    if wanted not in lineage:
        return True
    return lineage.on_line(wanted) and (not lineage.on_line(version) or lineage.depth(version) < lineage.depth(wanted))
