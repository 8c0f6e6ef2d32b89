"""`towline up|down|status|audit|serve` and `towline run list`; `run fork` is fork.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from towline.errors import TowlineError, UsageError
from towline.runtime.terminal import say

SERVICES = ("buffer", "rollout_worker", "reward", "trainer", "publisher", "gateway")

app = typer.Typer(help="The runs on this machine.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def up(
    toml: Annotated[Path | None, typer.Argument(metavar="TOML", help="The run's settings.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The same, as an option.")] = None,
    store: Annotated[str | None, typer.Option(help="Instead of store.url: s3://bucket/prefix or file:///path.")] = None,
    steps: Annotated[int | None, typer.Option(help="Instead of run.steps.")] = None,
    run: Annotated[str | None, typer.Option(help="Instead of run.name.")] = None,
    engine: Annotated[str | None, typer.Option(help="Instead of rollout.engine: torch, sglang or synthetic.")] = None,
    backend: Annotated[str | None, typer.Option(help="Instead of trainer.backend: torch or megatron.")] = None,
    dp: Annotated[int | None, typer.Option(help="Instead of trainer.dp: data parallel ranks.")] = None,
    tp: Annotated[int | None, typer.Option(help="Instead of trainer.tp: tensor parallel ranks (megatron).")] = None,
    pp: Annotated[int | None, typer.Option(help="Instead of trainer.pp: pipeline parallel ranks (megatron).")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting.")] = None,
    as_json: Json = False,
) -> None:
    """Run everything on this machine until the run is finished; the same command goes on where it was stopped."""
    from towline.config import load_settings
    from towline.contract.control import VERIFY_FAILED_ALL
    from towline.local.cleanup import end_leftovers
    from towline.local.report import print_outcome
    from towline.local.run_directory import directory_of
    from towline.local.up import Interrupted, Up
    from towline.runtime.console import PlainConsole

    source = _one_path(toml, config)
    overrides = _overrides(settings or [])
    given = {"store.url": store, "run.steps": steps, "run.name": run, "rollout.engine": engine}
    given |= {"trainer.backend": backend, "trainer.dp": dp, "trainer.tp": tp, "trainer.pp": pp}
    overrides |= {key: value for key, value in given.items() if value is not None}
    loaded = load_settings(source, overrides)
    directory = directory_of(loaded)
    console = PlainConsole(stderr=as_json)
    with directory.lock():
        end_leftovers(directory)  # of an earlier `up` that was killed, should anything be left
        try:
            finished = asyncio.run(Up(loaded, source, directory, console).run())
        except Interrupted as stopped:
            console.print(
                f"stopped; `{_again(source, run, engine)}` goes on from here", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(128 + stopped.number) from None
    if as_json:
        print(json.dumps({"summary": finished.summary.plain(), "audit": finished.audit.as_dict()}))
    else:
        print_outcome(console, finished, directory)
    if finished.audit.end_reason == VERIFY_FAILED_ALL:
        raise TowlineError(
            f"reward.function failed on {loaded.reward.max_failed_groups} groups in a row, and the run ended; see "
            f"`towline dead list {loaded.run.name}`, put it right, then "
            f"`towline run fork {loaded.run.name} --from latest` or begin another run",
            code=VERIFY_FAILED_ALL,
        )
    if not finished.audit.clean:
        raise TowlineError(
            f"the audit found {len(finished.audit.violations)} violations; see `towline audit {loaded.run.name}`", code="audit"
        )


def down(target: Target, as_json: Json = False) -> None:
    """Stop a run and everything it has running on this machine; its data stays."""
    from towline.local.cleanup import end_run

    directory, _ = _find(target)
    ended = end_run(directory)
    if as_json:
        print(json.dumps({"run": directory.name, "ended": ended}))
    else:
        print(f"run {directory.name}: {'ended ' + ', '.join(ended) if ended else 'nothing was running'}")


def status(target: Target, as_json: Json = False) -> None:
    """Where a run stands, and each of its services."""
    from towline.local.status import print_status, read_status

    directory, settings = _find(target)
    found = asyncio.run(read_status(directory, settings))
    if as_json:
        print(json.dumps(found.plain()))
    else:
        print_status(found)


def audit(target: Target, as_json: Json = False) -> None:
    """Check the run's invariants from its logs and streams alone. Exit status 1 where one is violated."""
    from towline.audit.run import audit as check
    from towline.local.access import open_run
    from towline.store.log import Log

    directory, settings = _find(target)

    async def look() -> Any:
        async with open_run(directory, settings) as access:
            return await check(access.bus, Log(access.objects, access.settings.run.name), access.settings)

    report = asyncio.run(look())
    if as_json:
        print(report.as_json())
    else:
        for line in report.lines():
            say(line)
    if not report.clean:
        raise typer.Exit(1)


def serve(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=", ".join(SERVICES))],
    config: Annotated[Path, typer.Option("--config", help="The run's TOML file.")],
    replica: Annotated[str | None, typer.Option(help="Its name among its kind; the host's where it's left out.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Another setting, of this process alone.")
    ] = None,
) -> None:
    """Run one service in this process, as it is deployed: python -m towline.SERVICE."""
    name = service.replace("-", "_")
    if name not in SERVICES:
        raise UsageError(f"service {service!r}: use one of {', '.join(SERVICES)}", code="service_name")
    named = [] if replica is None else ["--replica", replica]
    for assignment in settings or []:
        variable, text = _variable(assignment)
        os.environ.pop(variable, None)  # so that it's the last of all, as a later --set is
        os.environ[variable] = text
    os.execv(sys.executable, [sys.executable, "-m", f"towline.{name}", "--config", str(config), *named])


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Option(help="Where the runs are.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """The runs that were ever up here."""
    from towline.local.cleanup import UP
    from towline.local.run_directory import Processes, RunDirectory

    rows = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        directory = RunDirectory(path.absolute())
        if not directory.exists:
            continue
        summary = json.loads(directory.summary_path.read_text()) if directory.summary_path.is_file() else {}
        running = UP in Processes(directory).alive()
        state = "up" if running else "finished" if summary else "stopped"
        rows.append(
            {"run": directory.name, "state": state, "steps": summary.get("steps"), "reward_last": summary.get("reward_last")}
        )
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print(f"no run was ever up in {folder}")
    for row in rows:
        reward = "" if row["reward_last"] is None else f"  reward {row['reward_last']:.3f} after {row['steps']} steps"
        print(f"{row['run']:32}  {row['state']}{reward}")


def _find(target: str) -> Any:
    from towline.local.run_directory import find_run

    return find_run(target)


def _one_path(toml: Path | None, config: Path | None) -> Path:
    if (toml is None) == (config is None):
        raise UsageError("give one TOML file: towline up run.toml", code="config_missing")
    path = toml if toml is not None else config
    assert path is not None
    return path


def _again(source: Path, run: str | None, engine: str | None) -> str:
    return f"towline up {source}{f' --run {run}' if run else ''}{f' --engine {engine}' if engine else ''}"


def _variable(assignment: str) -> tuple[str, str]:
    """How the environment says `section.key=value` to a service and to the ranks that it starts."""
    (key, _), text = _overrides([assignment]).popitem(), assignment.partition("=")[2]
    if key != key.lower() or "__" in key or "\0" in text:
        table = key.rpartition(".")[0]
        raise UsageError(
            f"--set {assignment!r}: give the whole table, as in --set '{table} = {{ KEY = VALUE }}'", code="override"
        )
    return f"TOWLINE_{key.replace('.', '__').upper()}", text


def _overrides(assignments: list[str]) -> dict[str, Any]:
    """`section.key=value`, the value read as TOML where it is that, else as a string."""
    found: dict[str, Any] = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        section, dot, name = key.strip().partition(".")
        if not (separator and dot and section and name):
            raise UsageError(f"--set {assignment!r}: use SECTION.KEY=VALUE", code="override")
        try:
            found[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = text
    return found
