"""Prompts that are admitted again: each promise is kept by exactly one new group, and each such group keeps one.

A promise is a drop that says `requeue`, or a `requeue` record: somebody's request about a group that was dropped without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from towline.contract.codec import digest
from towline.contract.control import RequeueRecord
from towline.contract.task import EVAL, SESSION, TRAIN, Task

Fault = Callable[[int, str, str], None]


def prompt_of(task: Task) -> bytes:
    """The prompt, its place in its source and its reference, as one value that equal ones share."""
    return digest(msgspec.msgpack.encode((task.prompt, task.prompt_ref, task.reference)))


@dataclass(slots=True)
class _Promise:
    why: str
    prompt: bytes | None
    """None: the dropped group's admission is purged."""
    kept_by: int | None = None


class Again:
    """Fed by the ledger, in CONTROL's order."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._promises: dict[int, _Promise] = {}

    def promised(self, group: int, reason: str, prompt: bytes | None) -> None:
        """Dropped with `requeue`."""
        self._promise(group, f"dropped as {reason}", prompt)

    def asked(self, record: RequeueRecord, lane: str | None, fate: str | None, prompt: bytes | None) -> None:
        """Requeued on request: of a train group that was dropped, with its own prompt."""
        where = f"group {record.group}"
        if lane not in (TRAIN, SESSION) or fate is None or fate == "evaluated":
            self._fault(1, where, f"requeued for dead letter {record.dead}, and it isn't a train group that was dropped")
        elif prompt != prompt_of(record.task):
            self._fault(1, where, f"requeued for dead letter {record.dead} with another prompt than its own")
        self._promise(record.group, f"requeued for dead letter {record.dead}", prompt_of(record.task))

    def purged(self, record: RequeueRecord) -> None:
        """The same of a group whose admission can't be read any more."""
        self._promise(record.group, f"requeued for dead letter {record.dead}", prompt_of(record.task))

    def _promise(self, group: int, why: str, prompt: bytes | None) -> None:
        before = self._promises.get(group)
        if before is not None:
            self._fault(1, f"group {group}", f"{why}, and its prompt had been promised before ({before.why})")
            return
        self._promises[group] = _Promise(why, prompt)

    def admitted(self, task: Task, requeues: int | None, *, purged: bool) -> None:
        """A task; `requeues` is the group whose prompt it says to have again, which is `purged` where its end can't be read."""
        where = f"group {task.group}"
        if requeues is None:
            waiting = next((group for group, promise in self._promises.items() if promise.kept_by is None), None)
            if waiting is not None and task.lane != EVAL and task.sample == 0:
                self._fault(1, where, f"drawn anew while the prompt of group {waiting} waits to be admitted again")
            return
        promise = self._promises.get(requeues)
        if promise is None:
            if not purged:
                self._fault(1, where, f"has the prompt of group {requeues} again, which no drop or request promised")
            self._promises[requeues] = _Promise("before what is purged", None, task.group)
            return
        if promise.kept_by not in (None, task.group):
            self._fault(1, where, f"has the prompt of group {requeues} again, as group {promise.kept_by} has already")
        elif promise.prompt is not None and promise.prompt != prompt_of(task):
            self._fault(1, where, f"has another prompt than group {requeues}, which it says to have again")
        promise.kept_by = promise.kept_by if promise.kept_by is not None else task.group
