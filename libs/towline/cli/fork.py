"""`towline run fork`: a new run whose base model is a version of another run, which it leaves as it is.

What is made, in this order: the version's folder, entry 0 in the new run's LOG, the new run's TOML. So a fork that was broken
off has no TOML, and the same command makes what is missing.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from towline.cli.paths import file_to_write
from towline.errors import ConflictError, MissingError, UsageError

if TYPE_CHECKING:
    from towline.config import Settings
    from towline.local.run_directory import RunDirectory
    from towline.store.log import Log
    from towline.store.objects import ObjectStore

LATEST = "latest"
_MOST_CHARACTERS = 32


def fork(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")],
    version: Annotated[str, typer.Option("--from", metavar="VERSION", help="Its number, or `latest`.")],
    name: Annotated[str | None, typer.Option(help="The new run's; RUN-vVERSION where it's left out.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with the new run's settings, but for its name and model.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other setting.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            "--out",
            callback=file_to_write,
            help="The new run's TOML; NAME.toml beside the run's own, where its code lies, if left out.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a new run that begins with the weights of another run's version; `towline up` on the TOML that is written runs it.

    Its steps count from 0, its prompts begin anew, and so does the optimiser, also where the version has a checkpoint: a
    checkpoint belongs to its run's own line. The other run isn't changed.
    """
    from towline.cli.runs import _overrides
    from towline.local.access import open_objects
    from towline.local.run_directory import RunDirectory, find_run
    from towline.local.toml import sections_toml
    from towline.runtime.files import write_private
    from towline.store.log import Log

    directory, before = find_run(target)
    with open_objects(directory, before) as objects:
        log = Log(objects, before.run.name)
        log.refresh()
        number = _number(log, version)
        child = name or _name(before.run.name, number)
        if child == before.run.name:
            raise UsageError(f"--name {child} is the run's own: give the new one another", code="run_name")
        new = RunDirectory(directory.path.with_name(child))
        code = _beside(directory)
        path = output or code / f"{child}.toml"
        if not path.absolute().parent.is_dir():
            raise UsageError(f"--out {path}: there is no folder {path.absolute().parent}", code="output")
        if path.exists() or new.exists:
            there = path if path.exists() else new.path
            raise ConflictError(f"{there} exists already: give another --name, or another --output", code="run_exists")
        given = _settings(before, directory, new, config, _overrides(settings or []))
        new.path.mkdir(parents=True, exist_ok=True)
        with new.lock(), _store(directory, new, before, given, objects) as into:
            entry = _copy(objects, log, number, into, new)
    text = f"# Run {before.run.name} at version {number}, depth {log.lineage.depth(number)}, as a run of its own.\n\n"
    write_private(path, text + sections_toml(_tree(given, new)))
    answer = {
        "run": child, "from": f"{before.run.name}@{number}", "depth": log.lineage.depth(number), "toml": str(path),
        "model_digest": entry.model_digest,
    }  # fmt: skip
    if as_json:
        print(json.dumps(answer))
        return
    print(f"run {child} begins at {answer['from']}")
    print(f"its settings are in {path}; `towline up {path}` runs it")
    if path.absolute().parent != code.absolute():
        print(f"code of its own is looked for beside that file; the run's was beside its own, in {code}")


def _number(log: Log, version: str) -> int:
    if not log.next_number:
        raise MissingError(f"run {log.run} has no versions yet", code="version_missing")
    if version == LATEST:
        return log.lineage.latest
    number = int(version) if version.isdecimal() else -1
    if number not in log.lineage.versions():
        raise UsageError(f"--from {version}: no such version; see `towline versions list`", code="version_missing")
    if log.lineage.quarantined(number):
        raise UsageError(f"version {number} is quarantined; give one that it doesn't stand on", code="version_quarantined")
    return number


def _name(run: str, number: int) -> str:
    name = f"{run}-v{number}"
    if len(name) > _MOST_CHARACTERS:
        raise UsageError(f"{name} is longer than {_MOST_CHARACTERS} characters: give a --name", code="run_name")
    return name


def _beside(directory: RunDirectory) -> Path:
    """The folder of the TOML file that the run was started from: its own code lies there."""
    return Path(directory.source_path.read_text()).parent if directory.source_path.is_file() else Path.cwd()


def _settings(
    before: Settings, directory: RunDirectory, new: RunDirectory, config: Path | None, overrides: dict[str, Any]
) -> Settings:
    """The new run's, as they will stand in its TOML: the other run's, or those of `config`."""
    from pydantic import ValidationError

    from towline.config import Settings, load_settings
    from towline.config_loading import faults
    from towline.local.effective import DRAIN_SECONDS

    if config is not None:
        tree = load_settings(config, {"run.name": new.name} | overrides).model_dump()
    else:
        tree = before.model_dump()
        for section, server in (("bus", directory.nats), ("store", directory.s3)):
            if _is_own(server(), before, section):
                tree[section] = type(getattr(before, section))().model_dump() | (
                    {"budget_bytes": before.bus.budget_bytes} if section == "bus" else {}
                )
        if before.service.drain_seconds == DRAIN_SECONDS:  # what `towline up` made of a longer one
            del tree["service"]["drain_seconds"]
        for dotted, value in overrides.items():
            section, _, key = dotted.partition(".")
            if section not in tree:
                raise UsageError(f"--set {dotted}: no such section", code="override")
            tree[section][key] = value
    tree["run"] |= {"name": new.name, "directory": str(new.path.parent)}
    tree["model"] = {"source": str(new.model_path), "publish_dtype": tree["model"]["publish_dtype"]}
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"the new run's settings: {faults(error, Settings)}", code="config") from None


def _is_own(server: Any, settings: Settings, section: str) -> bool:
    """Whether the run's bus or store is a server that `towline up` started for it."""
    try:
        return bool(server.url == settings.bus.url if section == "bus" else server.endpoint == settings.store.endpoint)
    except MissingError:
        return False


@contextlib.contextmanager
def _store(
    directory: RunDirectory, new: RunDirectory, before: Settings, given: Settings, objects: ObjectStore
) -> Iterator[ObjectStore]:
    """Where the new run's versions go: its settings' store, or the S3 server that `towline up` will start for it."""
    from towline.store.objects import open_store

    if given.store.url:
        yield objects if given.store == before.store else open_store(given.store)
        return
    server = new.s3()
    server.start()
    try:
        yield open_store(server.settings(given.store))
    finally:
        server.stop()


def _copy(objects: ObjectStore, log: Log, number: int, into: ObjectStore, new: RunDirectory) -> Any:
    """The version's folder, and entry 0 of the new run's LOG."""
    from towline.cli import collecting
    from towline.contract.entries import BaseEntry, VersionEntry
    from towline.store.base import base_files, seed_base_state
    from towline.store.log import Log
    from towline.store.materialize import materialize
    from towline.store.portable import replacing_folder, write_model

    with collecting.held(objects, log, number):
        state = materialize(objects, log, number)
    shutil.rmtree(new.model_path, ignore_errors=True)  # of a fork that was broken off
    with replacing_folder(new.model_path) as folder:
        write_model(objects, log, state, folder)
    entry = log.entry(number)
    probe = entry.probe if isinstance(entry, BaseEntry | VersionEntry) else None
    others = base_files(objects, log)
    return seed_base_state(into, Log(into, new.name), state, others, f"{log.run}@{number}", None, probe)


def _tree(given: Settings, new: RunDirectory) -> dict[str, dict[str, Any]]:
    """What differs from the defaults, by section."""
    tree: dict[str, dict[str, Any]] = given.model_dump(exclude_defaults=True)
    if (Path.cwd() / given.run.model_fields["directory"].default).absolute() == new.path.parent:
        tree["run"].pop("directory", None)
    return {section: values for section, values in tree.items() if values}
