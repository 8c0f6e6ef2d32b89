"""Requests to admit a dropped group's prompt again: checked against CONTROL, decided by a `requeue` record, each group once.

A request is somebody's word: what it points to is read and must be a task and a drop of one and the same train group. A request
that says anything else is told in the log and counted, and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import structlog

from towline.buffer.state import State
from towline.bus.client import Bus, Message
from towline.bus.topology import CONTROL, DEAD
from towline.contract.control import DropRecord, Record, ReissueRecord, RequeueRecord, TaskRecord, decode_control
from towline.contract.requests import RequeueRequest, decode_request, request_stage
from towline.contract.task import SESSION, TRAIN
from towline.errors import InvariantError, MalformedError, MissingError, UnavailableError

RETRY_SECONDS = 1.0
MOST_WAITING = 10_000
_log = structlog.get_logger("towline.buffer")


class Requests:
    """`read` beside the leader's loop; `decide` in it."""

    def __init__(self, bus: Bus, wake: Callable[[], None]) -> None:
        self.refused = 0
        self._bus = bus
        self._wake = wake
        self._waiting: deque[Message] = deque(maxlen=MOST_WAITING)

    async def read(self) -> NoReturn:
        """Every request from the first on: those that were decided before are found decided. Trouble with DEAD is waited out."""
        subject = f"{self._bus.topology.dead(request_stage(0)).rpartition('.')[0]}.*"
        start = 1
        while True:
            try:
                async with contextlib.aclosing(self._bus.read(DEAD, start=start, subjects=[subject])) as messages:
                    async for message in messages:
                        self._waiting.append(message)
                        start = message.sequence + 1
                        self._wake()
            except (UnavailableError, InvariantError) as error:
                _log.warning("requests_unreadable", reason=error.message)
                if isinstance(error, InvariantError):
                    start = 1  # DEAD was made anew
            await asyncio.sleep(RETRY_SECONDS)

    async def decide(self, state: State) -> RequeueRecord | None:
        """The record of the next request that is to be granted; None when none is left. Append and apply it before the next."""
        while self._waiting:
            message = self._waiting[0]
            try:
                found = await self._look_up(message, state)
            except UnavailableError as error:
                _log.warning("request_put_off", reason=error.message)
                return None
            self._waiting.popleft()
            if isinstance(found, RequeueRecord):
                return found
            if found:
                self.refused += 1
                _log.warning("request_refused", subject=message.subject, reason=found)
        return None

    async def _look_up(self, message: Message, state: State) -> RequeueRecord | str:
        """The record, or why not; empty where it was granted before."""
        try:
            request = decode_request(message.data)
        except MalformedError as error:
            return error.message
        if request.run != self._bus.topology.run or message.subject != self._bus.topology.dead(request_stage(request.dead)):
            return f"it's of run {request.run}, dead letter {request.dead}"
        task = await self._record(request.task_sequence)
        drop = await self._record(request.drop_sequence)
        if not isinstance(task, TaskRecord | ReissueRecord) or not isinstance(drop, DropRecord):
            return f"CONTROL {request.task_sequence} and {request.drop_sequence} aren't a task and a drop"
        return self._judge(request, task, drop, state)

    def _judge(
        self, request: RequeueRequest, task: TaskRecord | ReissueRecord, drop: DropRecord, state: State
    ) -> RequeueRecord | str:
        group = task.task.group
        if drop.group != group or task.task.lane not in (TRAIN, SESSION):
            return f"the task is of group {group}, lane {task.task.lane}; the drop of group {drop.group}"
        if group in state.requeued:
            return ""
        if drop.requeue is True or group in state.requeue:
            return f"group {group} was requeued when it was dropped"
        return RequeueRecord(writer="", dead=request.dead, group=group, task=task.task)

    async def _record(self, sequence: int) -> Record | None:
        try:
            return decode_control((await self._bus.get(CONTROL, sequence)).data)
        except (MissingError, MalformedError):
            return None
