"""`towline store mirror`: a run's versions copied to a store near the replicas that read them, once or for ever."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.numbers import finite
from towline.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from towline.config import StoreSettings
    from towline.store.mirror import Mirror

app = typer.Typer(help="Copies of a run's store.", no_args_is_help=True)


@app.command()
def mirror(
    source: Annotated[str, typer.Argument(metavar="SRC", help="The run, by its name (of one in ./runs) or its TOML file.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="s3://bucket/prefix, file:///path, or a run's TOML file.")],
    endpoint: Annotated[str, typer.Option(help="DST's http(s)://host:port.")] = "",
    region: Annotated[str, typer.Option(help="DST's region; us-east-1 where it's left out.")] = "",
    keys_folder: Annotated[str, typer.Option(help="DST's keys, from `towline access s3`; role operator's are used.")] = "",
    ca: Annotated[str, typer.Option(help="PEM file: who signed DST's certificate.")] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Go on until SIGTERM.")] = False,
    every: Annotated[
        float, typer.Option(min=0.05, callback=finite, metavar="SECONDS", help="With --follow: how often SRC's LOG is read.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Copy the versions that DST hasn't, each verified, its LOG entry last. It can be stopped and called again at any time.

    Replicas nearby read DST. What `towline versions gc` collects there isn't copied again. Nothing else may write there.
    """
    from towline.access.identity import store_as
    from towline.access.roles import OPERATOR, VIEWER
    from towline.local.access import open_objects
    from towline.local.run_directory import find_run
    from towline.store.mirror import Mirror
    from towline.store.objects import open_store

    directory, settings = find_run(source)
    to = store_as(_target(target, endpoint, region, keys_folder, ca), OPERATOR)
    if (to.url, to.endpoint) == (settings.store.url, settings.store.endpoint):
        raise UsageError(f"SRC and DST are the same store, {to.url}", code="mirror_self")
    with open_objects(directory, settings, VIEWER) as objects:
        copy = Mirror(objects, open_store(to), settings.run.name)
        if follow:
            _follow(copy, every, as_json)
        else:
            _tell(copy, 0.0, as_json, always=True)


def _follow(copy: Mirror, every: float, as_json: bool) -> None:
    """Passes until SIGTERM or SIGINT; a store that doesn't answer is asked again, what only a person can mend ends it."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    away = ""
    try:
        first = True
        while not stop.is_set():
            try:
                _tell(copy, time.time(), as_json, always=first)
                first, away = False, ""
            except UnavailableError as error:
                if error.code != away:  # once for each outage
                    line = {"at": time.time(), "failed": error.code, "reason": error.message}
                    print(json.dumps(line) if as_json else f"{error.code}: {error.message}; tried again", flush=True)
                away = error.code
            stop.wait(every)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(copy: Mirror, at: float, as_json: bool, *, always: bool) -> None:
    """One pass, and a line about it if it copied something."""
    from towline.report.progress import size

    done = copy.copy()
    if not (always or done.entries or done.anchors):
        return
    if as_json:
        print(json.dumps(({"at": at} if at else {}) | done.plain() | {"head": copy.head}), flush=True)
        return
    gone = f", {done.gone} of them given up at home" if done.gone else ""
    print(
        f"{done.entries} entries to {copy.head}{gone}; {done.versions} versions, {done.anchors} anchors, {done.files} files, "
        f"{size(done.bytes)}",
        flush=True,
    )


def _target(target: str, endpoint: str, region: str, keys_folder: str, ca: str) -> StoreSettings:
    from towline.config import StoreSettings, load_settings

    given = {"--endpoint": endpoint, "--region": region, "--keys-folder": keys_folder, "--ca": ca}
    options = [name for name, value in given.items() if value]
    if target.startswith("s3://"):
        there = StoreSettings(url=target, endpoint=endpoint, keys_folder=keys_folder, ca=ca)
        return there.model_copy(update={"region": region}) if region else there
    if target.startswith("file://"):
        if options:
            raise UsageError(
                f"{target} is a folder, which has no keys and no server: leave {', '.join(options)} out", code="mirror_target"
            )
        return StoreSettings(url=target)
    if not Path(target).is_file():
        raise UsageError(f"DST {target!r}: give s3://bucket/prefix, file:///path or a TOML file", code="mirror_target")
    if options:
        raise UsageError(f"{target} names DST whole: leave {', '.join(options)} out", code="mirror_target")
    return load_settings(Path(target)).store
