"""Which dead letters' groups can be admitted again, and asking the buffer for it.

What makes sense is decided by the group: one of lane train that was dropped, and whose task still stands in CONTROL. A letter
that names none (an unreadable staged version, which the trainer sends again by itself) or whose group lives on can't be requeued.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from towline.bus.client import Bus, Message
from towline.bus.topology import CONTROL, DEAD
from towline.contract.codec import encode
from towline.contract.control import DropRecord, ReissueRecord, RequeueRecord, TaskRecord, decode_control
from towline.contract.groups import is_external, parse_group
from towline.contract.requests import STAGE, RequeueRequest, request_stage
from towline.contract.task import SESSION, TRAIN
from towline.errors import MalformedError, MissingError, UsageError
from towline.runtime.run_end import run_has_ended

State = Literal["requeued", "asked", "refused"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one dead letter. `asked`: the request stands, and no buffer has answered yet."""

    sequence: int
    group: int | None
    state: State
    why: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Known:
    """What CONTROL has of the groups in question."""

    tasks: dict[int, int] = field(default_factory=dict)
    """Group -> the first of its tasks."""
    drops: dict[int, tuple[int, DropRecord]] = field(default_factory=dict)
    requeued: set[int] = field(default_factory=set)
    end: int = 0
    """CONTROL was read to here."""


async def letters(bus: Bus, stage: str | None = None) -> AsyncIterator[Message]:
    """The dead letters, oldest first; requests aren't among them."""
    subjects = None if stage is None else [bus.topology.dead(stage)]
    requests = bus.topology.dead(STAGE) + "."
    async with contextlib.aclosing(bus.read(DEAD, subjects=subjects, follow=False)) as messages:
        async for message in messages:
            if not message.subject.startswith(requests):
                yield message


async def asked(bus: Bus) -> set[int]:
    """The dead letters that requests stand for."""
    subjects = [f"{bus.topology.dead(STAGE)}.*"]
    async with contextlib.aclosing(bus.read(DEAD, subjects=subjects, follow=False)) as messages:
        return {int(message.subject.rpartition(".")[2]) async for message in messages}


async def requeued(bus: Bus) -> set[int]:
    """The groups that were admitted again on request."""
    found: set[int] = set()
    async with contextlib.aclosing(bus.read(CONTROL, subjects=[bus.topology.control("requeue")], follow=False)) as messages:
        async for message in messages:
            record = decode_control(message.data)
            if isinstance(record, RequeueRecord):
                found.add(record.group)
    return found


def group_of(letter: Message, relative: Callable[[str], str]) -> int | None:
    """The group that the letter is about, by the subject that it came from; a worker's letters are tasks."""
    try:
        subject = json.loads(letter.headers.get("Towline-Context", "{}")).get("subject", "")
    except (ValueError, AttributeError):
        return None
    words = relative(str(subject)).split(".")
    if words[0] in ("trajectory", "partial") and len(words) == 3:
        return parse_group(words[1])
    if words[0] == "outcome" and len(words) == 4:
        return parse_group(words[2])
    if words[0] == "control":
        with contextlib.suppress(MalformedError):
            record = decode_control(letter.data)
            return record.task.group if isinstance(record, TaskRecord | ReissueRecord) else None
    return None


async def requeue(bus: Bus, steps: int, *, sequences: list[int] | None, stage: str | None, wait_seconds: float) -> list[Answer]:
    """Ask for the letters at `sequences`, or for all whose group can be requeued; an answer for each that was asked for."""
    if await run_has_ended(bus, steps):
        raise UsageError("the run has ended and admits nothing; raise run.steps and start it again", code="run_ended")
    chosen = await _chosen(bus, sequences, stage)
    known = await _known(bus, {group for group in chosen.values() if group is not None})
    answers: dict[int, Answer] = {}
    waiting: dict[int, list[int]] = {}
    for sequence, group in chosen.items():
        why = _why_not(group, known)
        if why is not None:
            if sequences is not None:
                answers[sequence] = Answer(sequence, group, "refused", why)
        elif group in known.requeued:
            answers[sequence] = Answer(sequence, group, "requeued", f"group {group} was admitted again before")
        elif group is not None:
            if group not in waiting:
                await _ask(bus, sequence, known.tasks[group], known.drops[group][0])
            waiting.setdefault(group, []).append(sequence)
    done = await _wait(bus, known.end, set(waiting), wait_seconds)
    for group, letters_of in waiting.items():
        for sequence in letters_of:
            if group in done:
                answers[sequence] = Answer(sequence, group, "requeued", f"group {group}'s prompt is admitted again")
            else:
                why = f"group {group}: no buffer has answered within {wait_seconds:g} s; the request stands"
                answers[sequence] = Answer(sequence, group, "asked", why)
    return [answers[sequence] for sequence in sorted(answers)]


async def _chosen(bus: Bus, sequences: list[int] | None, stage: str | None) -> dict[int, int | None]:
    """Dead letter -> its group."""
    if sequences is None:
        return {letter.sequence: group_of(letter, bus.topology.relative) async for letter in letters(bus, stage)}
    found: dict[int, int | None] = {}
    for sequence in dict.fromkeys(sequences):
        try:
            letter = await bus.get(DEAD, sequence)
        except MissingError:
            raise MissingError(f"run {bus.topology.run} has no dead letter {sequence}; see `towline dead list`") from None
        if letter.subject.startswith(bus.topology.dead(STAGE) + "."):
            raise MissingError(f"{sequence} is a request, no dead letter; see `towline dead list`")
        found[sequence] = group_of(letter, bus.topology.relative)
    return found


async def _known(bus: Bus, groups: set[int]) -> _Known:
    topology, known = bus.topology, _Known()
    known.end = (await bus.stream_state(CONTROL)).last_sequence
    subjects = [name(lane) for lane in (TRAIN, SESSION) for name in (topology.task, topology.reissue)]
    subjects += [topology.control("drop"), topology.control("requeue")]
    async with contextlib.aclosing(bus.read(CONTROL, subjects=subjects, follow=False)) as messages:
        async for message in messages:
            try:
                record = decode_control(message.data)
            except MalformedError:
                continue
            match record:
                case TaskRecord(task=task) | ReissueRecord(task=task) if task.group in groups:
                    known.tasks.setdefault(task.group, message.sequence)
                case DropRecord() if record.group in groups:
                    known.drops[record.group] = (message.sequence, record)
                case RequeueRecord():
                    known.requeued.add(record.group)
    return known


def _why_not(group: int | None, known: _Known) -> str | None:
    if group is None:
        return "it's about no group: there's no prompt to admit again"
    if is_external(group):
        return f"group {group} came from outside: send it again from there"
    if group not in known.tasks:
        return f"group {group} has no task of lane train in CONTROL: it's an evaluation's, or its task is purged"
    if group not in known.drops:
        return f"group {group} wasn't dropped: it's open, it was trained, or its drop is purged"
    if known.drops[group][1].requeue is True:
        return f"group {group}'s prompt was admitted again when it was dropped"
    return None


async def _ask(bus: Bus, dead: int, task_sequence: int, drop_sequence: int) -> None:
    request = RequeueRequest(run=bus.topology.run, dead=dead, task_sequence=task_sequence, drop_sequence=drop_sequence)
    await bus.create(bus.topology.dead(request_stage(dead)), encode(request))


async def _wait(bus: Bus, start: int, groups: set[int], seconds: float) -> set[int]:
    """Of `groups`, those that the buffer has requeued in time."""
    found: set[int] = set()
    if not groups:
        return found
    subjects = [bus.topology.control("requeue")]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async with contextlib.aclosing(bus.read(CONTROL, start=start + 1, subjects=subjects)) as messages:
                async for message in messages:
                    record = decode_control(message.data)
                    if isinstance(record, RequeueRecord):
                        found.add(record.group)
                    if found >= groups:
                        return found
    return found
