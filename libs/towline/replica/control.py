"""What a rollout worker learns from CONTROL besides its tasks: closed evaluations, cancelled tasks, the run's end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.contract.control import (
    CancelRecord,
    DropRecord,
    EndRecord,
    EvalRecord,
    ReissueRecord,
    TaskRecord,
    decode_control,
)
from towline.contract.task import EVAL
from towline.errors import MalformedError, UnavailableError

CANCELLED_KEPT = 100_000
"""Cancelled tasks that are remembered, for a delivery that comes after the record."""
_RETRY_SECONDS = 1.0
_log = structlog.get_logger(__name__)


class ControlFeed:
    """Follows CONTROL's eval, drop, cancel and end records and the eval lane's tasks, from the first one on.

    `on_change` is called after each record that may change which version is wanted, `on_cancel` with a cancelled task's
    sequence.
    """

    def __init__(self, bus: Bus) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_cancel: Callable[[int], None] = lambda task_sequence: None
        self.end_noted = asyncio.Event()
        """Set by each `end` record; whether the run went on after it is for the reader to see, who clears it."""
        self.caught_up = asyncio.Event()
        """Set once everything that stood in CONTROL at the start has been read."""
        self._bus = bus
        self._closed: set[int] = set()
        self._open_groups: dict[int, set[int]] = {}
        self._version_of_group: dict[int, int] = {}
        self._cancelled: dict[int, None] = {}

    def eval_is_closed(self, version: int) -> bool:
        """An `eval` record for it stands, or each of its groups that were issued has been dropped."""
        return version in self._closed or self._open_groups.get(version) == set()

    def eval_is_issued(self, version: int) -> bool:
        """Some of its groups were issued, and it isn't closed."""
        return bool(self._open_groups.get(version)) and version not in self._closed

    def cancelled(self, task_sequence: int) -> bool:
        return task_sequence in self._cancelled

    async def run(self) -> None:
        """Follow for ever. Lost connections are waited out; `InvariantError` where CONTROL went backwards."""
        topology = self._bus.topology
        subjects = [topology.control(kind) for kind in ("eval", "drop", "cancel", "end")]
        subjects += [f"{topology.task(EVAL)}.>", f"{topology.reissue(EVAL)}.>"]
        read_to = 0
        while True:
            try:
                for follow in (False, True):
                    messages = self._bus.read(CONTROL, start=read_to + 1, subjects=subjects, follow=follow)
                    async with contextlib.aclosing(messages):
                        async for message in messages:
                            self._take(message.data, message.sequence)
                            read_to = message.sequence
                    if not self.caught_up.is_set():
                        self.caught_up.set()
                        self.on_change()
            except UnavailableError as error:
                _log.warning("control_unreachable", reason=error.message)
                await asyncio.sleep(_RETRY_SECONDS)

    def _take(self, data: bytes, sequence: int) -> None:
        try:
            record = decode_control(data)
        except MalformedError as error:
            _log.error("control_record_unreadable", sequence=sequence, reason=error.message)
            return
        match record:
            case CancelRecord():
                self._cancelled[record.task_sequence] = None
                if len(self._cancelled) > CANCELLED_KEPT:
                    del self._cancelled[next(iter(self._cancelled))]
                self.on_cancel(record.task_sequence)
            case TaskRecord() | ReissueRecord():
                if (version := record.task.exact_version) is not None:
                    self._version_of_group[record.task.group] = version
                    self._open_groups.setdefault(version, set()).add(record.task.group)
            case DropRecord(lane=lane, group=group) if lane == EVAL:
                if (version := self._version_of_group.pop(group, None)) is not None:
                    self._open_groups[version].discard(group)
            case EvalRecord():
                self._closed.add(record.version)
                for row in record.rows:
                    self._version_of_group.pop(row.group, None)
                self._open_groups.pop(record.version, None)
            case EndRecord():
                self.end_noted.set()
            case _:
                return
        if self.caught_up.is_set() and not isinstance(record, CancelRecord):
            self.on_change()
