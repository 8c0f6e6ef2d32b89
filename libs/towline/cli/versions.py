"""`towline versions list|show|verify`: the run's policy versions, read from the LOG and its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from towline.errors import CorruptError, TowlineError, UsageError

if TYPE_CHECKING:
    from towline.store.log import Log
    from towline.store.objects import ObjectStore

app = typer.Typer(help="Policy versions of a run.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")]
Number = Annotated[int, typer.Argument(metavar="VERSION", help="The version's number: its entry in the LOG.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]


@app.command("list")
def list_versions(target: Target, as_json: Json = False) -> None:
    """Every version, the newest last."""
    from towline.local.progress import size

    with _opened(target) as (_, log):
        rows = [_row(log, number) for number in log.lineage.versions()]
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{'version':>7}  {'base':>7}  {'epoch':>5}  {'depth':>5}  {'kind':5}  {'bytes':>9}  {'density':>7}  notes")
    for row in rows:
        base, epoch = ("-" if row[key] is None else str(row[key]) for key in ("base", "epoch"))
        density = "-" if row["density"] is None else f"{row['density']:.1%}"
        notes = [note for note in ("quarantined" if row["quarantined"] else "", "" if row["on_line"] else "off the line") if note]
        notes += [f"checkpoint {row['checkpoint']}"] if row["checkpoint"] else []
        print(f"{row['version']:>7}  {base:>7}  {epoch:>5}  {row['depth']:>5}  {row['kind']:5}  "
              f"{size(row['wire_bytes']):>9}  {density:>7}  {', '.join(notes)}".rstrip())  # fmt: skip


@app.command()
def show(target: Target, version: Number, as_json: Json = False) -> None:
    """One version's entry, whole."""
    with _opened(target) as (_, log):
        _known(log, version)
        entry = msgspec.to_builtins(log.entry(version))
        more = {key: value for key, value in _row(log, version).items() if key in ("on_line", "quarantined")}
        digest = log.digest(version)
    if as_json:
        print(json.dumps({"entry": entry, "digest": digest, **more}))
        return
    for key, value in (entry | {"digest": digest} | more).items():
        if key == "probe" and value is not None:
            value = f"{len(value['tokens'])} tokens, tolerance {value['tolerance']:g}"
        print(f"{key:16} {value}")


@app.command()
def verify(
    target: Target,
    version: Annotated[int | None, typer.Argument(metavar="[VERSION]", help="Only this one; default: all of the line.")] = None,
    as_json: Json = False,
) -> None:
    """Build versions from their stored bytes and compare every digest. Exit status 1 where one is wrong."""
    from towline.store.materialize import materialize

    results: list[dict[str, Any]] = []
    with _opened(target) as (objects, log):
        if version is not None:
            _known(log, version)
        have = None
        for number in log.lineage.path() if version is None else [version]:
            try:
                have = (number, materialize(objects, log, number, have))
                results.append({"version": number, "ok": True, "problem": None})
            except TowlineError as error:
                results.append({"version": number, "ok": False, "problem": error.message})
    wrong = [result for result in results if not result["ok"]]
    if as_json:
        print(json.dumps(results))
    else:
        for result in wrong:
            print(f"version {result['version']}: {result['problem']}")
        print(f"{len(results) - len(wrong)} of {len(results)} versions are what the LOG says")
    if wrong:
        raise CorruptError(f"{len(wrong)} versions can't be built from what is stored", code="versions_corrupt")


@contextmanager
def _opened(target: str) -> Iterator[tuple[ObjectStore, Log]]:
    """The run's store and its LOG, read to the head."""
    from towline.local.access import open_objects
    from towline.local.run_directory import find_run
    from towline.store.log import Log

    directory, settings = find_run(target)
    with open_objects(directory, settings) as objects:
        log = Log(objects, settings.run.name)
        log.refresh()
        yield objects, log


def _known(log: Log, version: int) -> None:
    if version not in log.lineage.versions():
        raise UsageError(f"version {version}: there is none; see `towline versions list`", code="version_missing")


def _row(log: Log, number: int) -> dict[str, Any]:
    from towline.contract.entries import VersionEntry

    entry, lineage = log.entry(number), log.lineage
    committed = entry if isinstance(entry, VersionEntry) else None
    return {
        "version": number,
        "base": committed.base if committed else None,
        "epoch": committed.epoch if committed else None,
        "depth": lineage.depth(number),
        "kind": committed.representation if committed else "base",
        "wire_bytes": committed.wire_bytes if committed else None,
        "density": committed.density if committed else None,
        "checkpoint": committed.checkpoint if committed else None,
        "quarantined": lineage.quarantined(number),
        "on_line": lineage.on_line(number),
        "at": entry.at,
    }
