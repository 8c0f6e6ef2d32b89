"""`towline dead list|show|requeue`: messages that nobody could act on, whole, with the reason and where they came from."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli.numbers import finite
from towline.errors import MissingError, UsageError
from towline.runtime.terminal import say

if TYPE_CHECKING:
    from towline.bus.client import Message

app = typer.Typer(help="Messages that nobody could act on, with the reason.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: a line for each message.")]


@app.command("list")
def list_dead(
    target: Target,
    stage: Annotated[str | None, typer.Option(help="Only of this stage: rollout, reward, outcome, publisher.")] = None,
    last: Annotated[int, typer.Option(min=1, help="At most so many, the newest.")] = 50,
    as_json: Json = False,
) -> None:
    """The newest dead letters, the newest last, and how many there are for each stage."""
    rows, counts = asyncio.run(_list(target, stage, last))
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    for row in rows:
        context = " ".join(f"{key}={value}" for key, value in row["context"].items())
        requeue = f"  [{row['requeue']}]" if row["requeue"] else ""
        say(f"{row['sequence']:>8}  {row['stage']:10} {row['nbytes']:>9} bytes  {row['reason']}  ({context}){requeue}")
    say(", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no dead letters")


@app.command()
def show(
    target: Target,
    sequence: Annotated[int, typer.Argument(min=1, help="As `list` prints it.")],
    raw: Annotated[bool, typer.Option("--raw", help="Write the message's bytes to stdout, as they were.")] = False,
    as_json: Json = False,
) -> None:
    """One dead letter: why, from where, and what can be read of it."""
    row, data = asyncio.run(_show(target, sequence))
    if raw:
        sys.stdout.buffer.write(data)
        return
    from towline.view.letters import content_of

    row |= {"content": content_of(data)}
    if as_json:
        print(json.dumps(row, default=repr))
        return
    for key, value in row.items():
        say(f"{key:10} {value}")


@app.command()
def requeue(
    target: Target,
    sequences: Annotated[list[int] | None, typer.Argument(min=1, metavar="ID…", help="As `list` prints them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every dead letter whose group was dropped.")] = False,
    stage: Annotated[str | None, typer.Option(help="With --all: only of this stage.")] = None,
    wait_seconds: Annotated[
        float, typer.Option("--wait", min=0, callback=finite, help="Seconds to wait for the buffer's answer.")
    ] = 10.0,
    as_json: Json = False,
) -> None:
    """Have the prompts of groups that were dropped over dead letters admitted again, each as a new group, once.

    The dropped group stays dropped. The buffer decides; where none runs, it does when it's back. Exit status 1 where one of the
    given letters couldn't be requeued.
    """
    if bool(sequences) == everything:
        raise UsageError("give dead letters by number, or --all; see `towline dead list`")
    if stage is not None and not everything:
        raise UsageError("--stage goes with --all")
    answers = asyncio.run(_requeue(target, sequences, stage, wait_seconds))
    for answer in answers:
        say(json.dumps(answer) if as_json else f"{answer['sequence']:>8}  {answer['state']:9} {answer['why']}")
    if not answers and not as_json:
        print("no dead letter whose group was dropped")
    if sequences and any(answer["state"] == "refused" for answer in answers):
        raise typer.Exit(1)


async def _requeue(target: str, sequences: list[int] | None, stage: str | None, wait_seconds: float) -> list[dict[str, Any]]:
    from towline.cli.requeueing import requeue as ask
    from towline.local.access import open_run
    from towline.local.run_directory import find_run

    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        answers = await ask(access.bus, settings.run.steps, sequences=sequences, stage=stage, wait_seconds=wait_seconds)
    return [answer.as_dict() for answer in answers]


async def _list(target: str, stage: str | None, last: int) -> tuple[list[dict[str, Any]], Counter[str]]:
    from towline.cli.requeueing import asked, group_of, letters, requeued
    from towline.local.access import open_run
    from towline.local.run_directory import find_run

    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        bus = access.bus
        rows: deque[dict[str, Any]] = deque(maxlen=last)
        counts: Counter[str] = Counter()
        async for letter in letters(bus, stage):
            row = _row(letter, bus.topology.relative)
            counts[row["stage"]] += 1
            rows.append(row | {"requeue": "", "group": group_of(letter, bus.topology.relative)})
        done, waiting = await requeued(bus), await asked(bus)
    for row in rows:
        row["requeue"] = "requeued" if row.pop("group") in done else "asked" if row["sequence"] in waiting else ""
    return list(rows), counts


async def _show(target: str, sequence: int) -> tuple[dict[str, Any], bytes]:
    from towline.bus.topology import DEAD
    from towline.local.access import open_run
    from towline.local.run_directory import find_run

    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        try:
            message = await access.bus.get(DEAD, sequence)
        except MissingError:
            raise MissingError(f"run {settings.run.name} has no dead letter {sequence}; see `towline dead list`") from None
        return _row(message, access.bus.topology.relative), message.data


def _row(message: Message, relative: Callable[[str], str]) -> dict[str, Any]:
    from towline.view.letters import letter_of

    letter = letter_of(message, relative)
    if letter is None:
        raise MissingError(f"{message.sequence} is a request, no dead letter; see `towline dead list`")
    return asdict(letter)
