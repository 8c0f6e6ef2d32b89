"""`towline versions list|show|verify|materialize|export|import|pin|unpin|quarantine`: a run's policy versions.

`towline versions gc` stands in `collecting.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from towline.cli import collecting
from towline.cli.paths import to_write
from towline.errors import CorruptError, TowlineError, UsageError
from towline.runtime.terminal import say

if TYPE_CHECKING:
    from towline.store.log import Log
    from towline.store.objects import ObjectStore

app = typer.Typer(help="Policy versions of a run.", no_args_is_help=True)

Target = Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")]
Number = Annotated[int, typer.Argument(min=0, metavar="VERSION", help="The version's number: its entry in the LOG.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
Output = Annotated[Path, typer.Option("--output", "-o", callback=to_write, help="The folder to write; it must not exist yet.")]
PinName = Annotated[str, typer.Option("--name", help="Whose pin it is: each name pins on its own.")]

app.command("gc")(collecting.gc)


@app.command("list")
def list_versions(target: Target, as_json: Json = False) -> None:
    """Every version, the newest last."""
    from towline.report.progress import size
    from towline.store.claims import pins

    with _opened(target) as (objects, log):
        pinned: dict[int, list[str]] = {}
        for standing in pins(objects, log.run):
            pinned.setdefault(standing.pin.version, []).append(standing.pin.name)
        rows = [_row(log, number) | {"pins": pinned.get(number, [])} for number in log.lineage.versions()]
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print("no versions yet: the trainer's first start makes entry 0")
        return
    print(f"{'version':>7}  {'base':>7}  {'epoch':>5}  {'depth':>5}  {'kind':5}  {'bytes':>9}  {'density':>7}  notes")
    for row in rows:
        base, epoch = ("-" if row[key] is None else str(row[key]) for key in ("base", "epoch"))
        density = "-" if row["density"] is None else f"{row['density']:.1%}"
        notes = [note for note in ("quarantined" if row["quarantined"] else "", "" if row["on_line"] else "off the line") if note]
        notes += [f"checkpoint {row['checkpoint']}"] if row["checkpoint"] else []
        notes += [f"pinned: {', '.join(row['pins'])}"] if row["pins"] else []
        say(f"{row['version']:>7}  {base:>7}  {epoch:>5}  {row['depth']:>5}  {row['kind']:5}  "
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
        say(f"{key:16} {value}")


@app.command()
def verify(
    target: Target,
    version: Annotated[
        int | None, typer.Argument(min=0, metavar="[VERSION]", help="Only this one; default: all of the line.")
    ] = None,
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
                gone = error.code == "version_gone" and version is None
                results.append({"version": number, "ok": gone, "problem": error.message})
    wrong = [result for result in results if not result["ok"]]
    if as_json:
        print(json.dumps(results))
    else:
        for result in wrong:
            say(f"version {result['version']}: {result['problem']}")
        gone_count = sum(result["ok"] and result["problem"] is not None for result in results)
        kept = len(results) - gone_count
        print(f"{kept - len(wrong)} of {kept} versions are what the LOG says"
              + (f"; {gone_count} were given up by retention" if gone_count else ""))  # fmt: skip
    if wrong:
        raise CorruptError(f"{len(wrong)} versions can't be built from what is stored", code="versions_corrupt")


@app.command()
def materialize(target: Target, version: Number, output: Output, as_json: Json = False) -> None:
    """Write a version as a Hugging Face folder, every tensor verified, tokenizer and config included."""
    from towline.store.materialize import materialize as build
    from towline.store.portable import replacing_folder, write_model

    with _opened(target) as (objects, log), replacing_folder(output) as folder:
        _known(log, version)
        with collecting.held(objects, log, version):
            state = build(objects, log, version)
        write_model(objects, log, state, folder)
        digest = getattr(log.entry(version), "model_digest", "")
    nbytes = sum(tensor.spec.nbytes for tensor in state.values())
    _print(
        {"version": version, "folder": str(output), "tensors": len(state), "model_bytes": nbytes, "model_digest": digest}, as_json
    )


@app.command("export")
def export_range(
    target: Target,
    versions: Annotated[str, typer.Argument(metavar="VERSION[..LAST]", help="One version, or a range along the lineage.")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Write versions as a folder that stands alone, with digests: the first one whole, the later ones as their deltas."""
    from towline.store.portable import export_versions

    first, last = _range(versions)
    with _opened(target) as (objects, log):
        _known(log, first)
        _known(log, last)
        if not log.lineage.is_ancestor(first, last):
            raise UsageError(f"version {last} doesn't stand on version {first}; give an ancestor", code="version_range")
        with collecting.held(objects, log, first):
            export = export_versions(objects, log, first, last, output)
    nbytes = sum(file.nbytes for file in export.files)
    _print({"folder": str(output), "versions": [v.number for v in export.versions], "bytes": nbytes}, as_json)


@app.command("import")
def import_folder(
    target: Target,
    folder: Annotated[Path, typer.Argument(help="A folder that `towline versions export` wrote.")],
    as_json: Json = False,
) -> None:
    """Bring an export into a run that has no entries yet. Everything is verified before anything is committed."""
    from towline.store.portable import import_versions

    with _opened(target) as (objects, log):
        done = import_versions(objects, log, folder)
    _print({"run": log.run, "versions": {str(old): new for old, new in done.numbers.items()}, "latest": done.latest}, as_json)


@app.command()
def pin(
    target: Target,
    version: Number,
    name: PinName = "cli",
    reason: Annotated[str, typer.Option(help="For who finds the pin later.")] = "",
    grace: collecting.Grace = collecting.DEFAULT_GRACE,
    as_json: Json = False,
) -> None:
    """Keep a version readable, and its checkpoint, until it is unpinned."""
    from towline.store.claims import Pin
    from towline.store.collect import pin as keep
    from towline.store.retention import Rules

    with _opened(target) as (objects, log):
        fresh = keep(objects, log, Pin(version=version, name=name, reason=reason), Rules(grace_seconds=collecting.seconds(grace)))
    _print({"version": version, "name": name, "new": fresh}, as_json)


@app.command()
def unpin(target: Target, version: Number, name: PinName = "cli", as_json: Json = False) -> None:
    """Take a pin away."""
    from towline.store.claims import remove_pin

    with _opened(target) as (objects, log):
        remove_pin(objects, log.run, version, name)
    _print({"version": version, "name": name}, as_json)


@app.command()
def quarantine(
    target: Target,
    version: Number,
    reason: Annotated[str, typer.Option("--reason", help="Stands in the LOG for good.")],
    as_json: Json = False,
) -> None:
    """Take a version and all that stands on it out of service, for good. Its trainer exits and opens on an earlier one."""
    from towline.store.quarantine import quarantine as condemn

    if not reason.strip():
        raise UsageError("--reason: say why, for whoever reads the LOG later", code="reason")
    with _opened(target) as (_, log):
        entry = condemn(log, version, reason)
        latest = log.lineage.latest
    _print({"version": version, "entry": entry.number if entry else None, "latest": latest}, as_json)


def _range(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not first.isdigit() or (dots and not last.isdigit()):
        raise UsageError(f"{text!r}: give a version's number, or FIRST..LAST", code="version_range")
    if int(last or first) < int(first):
        raise UsageError(f"{text!r}: the first version is the lesser one: {last}..{first}", code="version_range")
    return int(first), int(last or first)


def _print(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    for key, value in values.items():
        say(f"{key:16} {value}")


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
