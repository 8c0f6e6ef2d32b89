"""`towline bridge miles`: a run and a miles/slime folder kept alike, in one direction, once or as a follower."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from towline.cli.numbers import finite
from towline.cli.paths import to_write
from towline.errors import UnavailableError, UsageError

app = typer.Typer(help="Weights to and from other systems' layouts.", no_args_is_help=True)

MAX_BACKOFF_SECONDS = 30.0


@app.callback()
def _bridge() -> None:
    pass


@app.command()
def miles(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="A run's name (of one in ./runs) or its TOML file.")],
    watch: Annotated[Path, typer.Option("--watch", metavar="DIR", help="The folder with the weight_v000001 folders.")],
    direction: Annotated[
        str, typer.Option(help="export: the run into DIR. import: DIR into the run, which is the bridge's own.")
    ] = "export",
    once: Annotated[bool, typer.Option("--once", help="Do what there is to do, and end.")] = False,
    base: Annotated[
        Path | None, typer.Option(help="import into an empty run: the Hugging Face folder that is version 0.")
    ] = None,
    encoding: Annotated[str, typer.Option(help="export: xor or overwrite.")] = "xor",
    checksum: Annotated[str, typer.Option(help="export: xxh3-128, blake3 or adler32.")] = "xxh3-128",
    poll_seconds: Annotated[float, typer.Option(min=0.05, callback=finite, help="How often to look.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a version.")] = False,
) -> None:
    """Follow a run or a folder and bring each new version to the other side, verified. Ctrl-C or SIGTERM ends it."""
    import structlog

    from towline.interop.miles_export import Exporter
    from towline.interop.miles_import import Importer
    from towline.interop.miles_layout import CHECKSUMS, ENCODINGS
    from towline.local.access import open_objects
    from towline.local.run_directory import find_run
    from towline.store.log import Log

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    chosen: Literal["xor", "overwrite"] | None = next((known for known in ENCODINGS if known == encoding), None)
    if direction not in ("export", "import") or chosen is None or checksum not in CHECKSUMS:
        raise UsageError(
            f"use --direction export or import, --encoding {' or '.join(ENCODINGS)}, --checksum {', '.join(CHECKSUMS)}",
            code="bridge_option",
        )
    if direction == "export":
        to_write(watch)
    directory, settings = find_run(target)
    with _until_told_to_end() as over, open_objects(directory, settings) as objects:
        log = Log(objects, settings.run.name)
        side: Exporter | Importer = (
            Exporter(objects, log, watch, encoding=chosen, checksum=checksum, reader=_reader(watch))
            if direction == "export"
            else Importer(objects, log, watch, base)
        )
        wait = poll_seconds
        while True:
            try:
                for done in side.step():
                    _tell({name: getattr(done, name) for name in done.__slots__}, as_json)
                wait = poll_seconds
            except UnavailableError as error:
                if once:
                    raise
                typer.echo(f"{error.code}: {error.message}", err=True)
                wait = min(2 * wait, MAX_BACKOFF_SECONDS)
            if once or over.wait(wait):
                return


@contextlib.contextmanager
def _until_told_to_end() -> Iterator[threading.Event]:
    """Set by SIGTERM or Ctrl-C: the version that is on its way is finished first."""
    over = threading.Event()
    kept = {number: signal.signal(number, lambda *_: over.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield over
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _reader(watch: Path) -> str:
    """One for each folder of each host."""
    where = hashlib.sha256(f"{socket.gethostname()}:{watch.resolve()}".encode()).hexdigest()
    return f"bridge-{where[:16]}"


def _tell(values: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(values) if as_json else "  ".join(f"{key} {value}" for key, value in values.items()), flush=True)
