"""`towline replay`: train a run again and compare it bit for bit, feed it to a second trainer, send its trajectories once more,
or score them anew."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli import trajectories
from towline.cli.numbers import finite
from towline.cli.paths import file_to_write
from towline.cli.runs import _overrides
from towline.cli.source import SourceArgument, open_source
from towline.errors import UsageError
from towline.runtime.terminal import say

if TYPE_CHECKING:
    from towline.bundle.select import Filter
    from towline.cli.replay_into import Into
    from towline.replay.curve import Comparison
    from towline.replay.report import VersionResult


def replay(
    target: SourceArgument,
    verify: Annotated[bool, typer.Option("--verify", help="Train again on the CPU, compare every version's digest.")] = False,
    to: Annotated[
        str | None, typer.Option("--to", metavar="FILE|screen", help="Send the trajectories there, one a line.")
    ] = None,
    into: Annotated[
        str | None, typer.Option("--into", metavar="trainer", help="Feed a second trainer, in a run of its own, and compare.")
    ] = None,
    rescore: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Score the trajectories with this verifier and compare.")
    ] = None,
    start: Annotated[
        int,
        typer.Option("--from", min=0, metavar="VERSION", help="--verify: begin at its checkpoint; --into: with its weights."),
    ] = 0,
    until: Annotated[int | None, typer.Option(min=0, metavar="VERSION", help="--verify, --into: end at this version.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="--verify, --into: another setting.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="--into: the new run's; RUN-replay where it's left out.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="--into: a TOML file with the new run's settings instead of RUN's.")
    ] = None,
    groups_per_batch: Annotated[
        int | None,
        typer.Option("--rebatch", min=1, metavar="GROUPS", help="--into: the trajectories in batches of so many groups."),
    ] = None,
    go_on: Annotated[bool, typer.Option("--go-on", help="--verify: past the first difference.")] = False,
    speed: Annotated[
        float, typer.Option(min=0, callback=finite, help="--to, --into: times the recorded speed; 0: as fast as it goes.")
    ] = 0.0,
    step: Annotated[bool, typer.Option("--step", help="--to, --into: one at a time, at each Enter.")] = False,
    arguments: Annotated[str, typer.Option(metavar="JSON", help="--rescore: the verifier's arguments.")] = "{}",
    scope: Annotated[str | None, typer.Option(help="--rescore: sample or group; the run's where left out.")] = None,
    code: Annotated[Path | None, typer.Option(help="A folder with the run's own code, for import paths.")] = None,
    group: trajectories.Group = None,
    version: trajectories.Versions = None,
    reward: trajectories.Rewards = None,
    finish: trajectories.Finish = None,
    replica: trajectories.Replica = None,
    lane: trajectories.Lane = None,
    prompt: trajectories.Prompt = None,
    time: trajectories.Times = None,
    environment: trajectories.Environment = None,
    state: trajectories.State = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many trajectories.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a run or a bundle; the original is only read. Exit status 1 where a replay differs from the recorded run."""
    if sum([verify, to is not None, into is not None, rescore is not None]) != 1:
        raise UsageError(
            "give one of --verify, --into trainer, --to FILE|screen and --rescore MODULE:FUNCTION", code="replay_mode"
        )
    if to is not None and to != "screen":
        file_to_write(Path(to))
    if into not in (None, "trainer"):
        raise UsageError(f"--into {into!r}: use trainer; a file or the screen is --to", code="replay_mode")
    if code is not None:
        sys.path.insert(0, str(code.resolve()))
    wanted = trajectories.make_filter(group, version, reward, finish, replica, lane, prompt, time, environment, state)
    if verify:
        _verify(target, start, until, _overrides(settings or []), go_on, as_json, code)
    elif into is not None:
        from towline.cli.replay_into import Into

        asked = Into(
            name=name, config=config, changes=_overrides(settings or []), code=code, start=start, until=until,
            groups_per_batch=groups_per_batch, wanted=wanted, speed=speed, wait=_enter if step else None,
        )  # fmt: skip
        _into(target, asked, as_json)
    elif to is not None:
        asyncio.run(_send(target, to, wanted, speed, step, limit, as_json))
    elif rescore is not None:
        _rescore(target, rescore, _json(arguments), scope, wanted, limit, as_json)


def _verify(
    target: str, start: int, until: int | None, changes: dict[str, Any], go_on: bool, as_json: bool, code: Path | None
) -> None:
    from towline.cli.replay_rank import COMMAND
    from towline.replay.ranks import launcher
    from towline.replay.verify import verify

    launch = launcher(str(Path(target).resolve()) if Path(target).exists() else target, COMMAND, code)

    def tell(result: VersionResult) -> None:
        steps = ", ".join(map(str, result.batches))
        verdict = "equal" if result.equal else "differs"
        print(f"version {result.version:>5}  depth {result.depth:>5}  step {steps}: {verdict}", file=sys.stderr)

    async def run() -> Any:
        async with open_source(target) as source:
            return await verify(source, start=start, end=until, changes=changes, go_on=go_on, tell=tell, launch=launch, code=code)

    report = asyncio.run(run())
    _print(report.plain() if as_json else report.lines())
    if not report.equal:
        raise typer.Exit(1)


def _into(target: str, asked: Into, as_json: bool) -> None:
    from towline.cli.replay_into import into_trainer

    async def run() -> Comparison:
        async with open_source(target) as source:
            return await into_trainer(source, target, asked)

    found = asyncio.run(run())
    _print(found.plain() if as_json else found.lines())


async def _send(target: str, to: str, wanted: Filter, speed: float, step: bool, limit: int | None, as_json: bool) -> None:
    from towline.bundle.select import select
    from towline.replay.pace import paced
    from towline.replay.sink import Screen, ToFile

    sink = Screen(as_json) if to == "screen" else ToFile(Path(to))
    wait = _enter if step else None
    async with open_source(target) as source:
        with sink:
            async for item in paced(select(source, wanted), speed=speed, limit=limit, wait=wait):
                sink.take(item)
    if to != "screen":
        print(f"{sink.count} trajectories in {to}", file=sys.stderr)
    elif not sink.count:
        print("no trajectory matches", file=sys.stderr)


async def _enter() -> None:
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise UsageError("--step: the input has ended", code="step_end")


def _rescore(
    target: str, verifier: str, arguments: dict[str, Any], scope: str | None, wanted: Filter, limit: int | None, as_json: bool
) -> None:
    from towline.replay.rescore import rescore

    async def run() -> Any:
        async with open_source(target) as source:
            return await rescore(source, verifier, arguments, scope=scope, wanted=wanted, limit=limit)

    report = asyncio.run(run())
    _print(report.plain() if as_json else report.lines())


def _print(found: dict[str, Any] | Iterable[str]) -> None:
    """One JSON object, or lines for people."""
    for line in [json.dumps(found, default=str)] if isinstance(found, dict) else found:
        say(line)


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--arguments {text!r}: {error}; give a JSON object", code="arguments") from None
    if not isinstance(found, dict):
        raise UsageError(f"--arguments {text!r}: give a JSON object", code="arguments")
    return found
