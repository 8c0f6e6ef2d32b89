"""`towline dead list|show`: messages that nobody could act on, whole, with the reason and where they came from."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

import typer

from towline.errors import MalformedError, MissingError

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
        print(f"{row['sequence']:>8}  {row['stage']:10} {row['nbytes']:>9} bytes  {row['reason']}  ({context})")
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "no dead letters")


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
    row |= {"content": _content(data)}
    if as_json:
        print(json.dumps(row, default=repr))
        return
    for key, value in row.items():
        print(f"{key:10} {value}")


async def _list(target: str, stage: str | None, last: int) -> tuple[list[dict[str, Any]], Counter[str]]:
    from towline.bus.topology import DEAD
    from towline.local.access import open_run
    from towline.local.run_directory import find_run

    directory, settings = find_run(target)
    async with open_run(directory, settings) as access:
        bus = access.bus
        subjects = None if stage is None else [bus.topology.dead(stage)]
        rows: list[dict[str, Any]] = []
        counts: Counter[str] = Counter()
        async with contextlib.aclosing(bus.read(DEAD, subjects=subjects, follow=False)) as messages:
            async for message in messages:
                row = _row(message, bus.topology.relative)
                counts[row["stage"]] += 1
                rows = [*rows[1 - last :], row] if last > 1 else [row]
    return rows, counts


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


def _row(message: Any, relative: Callable[[str], str]) -> dict[str, Any]:
    headers = message.headers
    try:
        context = json.loads(headers.get("Towline-Context", "{}"))
    except ValueError:
        context = {"cut": headers["Towline-Context"]}  # a header has a length limit
    return {
        "sequence": message.sequence,
        "stage": relative(message.subject).partition(".")[2],
        "at": message.at,
        "nbytes": len(message.data),
        "reason": headers.get("Towline-Reason", ""),
        "context": context,
    }


def _content(data: bytes) -> Any:
    """The message's fields, as far as it is one that can be read; else its first bytes."""
    from towline.contract.codec import plain
    from towline.contract.control import decode_control
    from towline.contract.outcome import decode_outcome
    from towline.contract.policy import decode_policy
    from towline.contract.trajectory import decode_trajectory

    with contextlib.suppress(MalformedError):
        found = decode_trajectory(data)
        return {"group": found.group, "sample": found.sample, "tokens": found.tokens.tolist(), "reference": found.reference}
    for decode in (decode_outcome, decode_control, decode_policy):
        with contextlib.suppress(MalformedError):
            return plain(decode(data))
    return {"unreadable": data[:200].hex()}
