"""`towline delta diff|apply|fold|show`: weight deltas between files, without a bus or a store.

A model is a safetensors file or a Hugging Face folder; a delta is a folder of parts. What they do stands in delta_files.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from towline.cli.paths import to_write

app = typer.Typer(help="Weight deltas between safetensors files or checkpoint folders.", no_args_is_help=True)

Model = Annotated[Path, typer.Argument(help="A safetensors file or a Hugging Face checkpoint folder.")]
Delta = Annotated[Path, typer.Argument(help="A folder that `towline delta diff` wrote.")]
Output = Annotated[Path, typer.Option("--output", "-o", callback=to_write, help="Where to write; it must not exist yet.")]
Mode = Annotated[str, typer.Option(help="default, dense (smaller, slower) or idempotent (may be applied again).")]
Checksum = Annotated[str, typer.Option(help="xxh3-128, blake3 or adler32, inside the parts.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: the cores that may be used.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def diff(
    old: Model,
    new: Model,
    output: Output,
    mode: Mode = "default",
    checksum: Checksum = "xxh3-128",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write the delta that turns OLD into NEW."""
    from towline.cli import delta_files

    delta_files.diff(old, new, output, mode, checksum, threads, as_json)


@app.command()
def apply(old: Model, delta: Delta, output: Output, threads: Threads = None, as_json: Json = False) -> None:
    """Apply DELTA to OLD, verify every tensor and write the result: a file where OLD is one, else a folder like OLD."""
    from towline.cli import delta_files

    delta_files.apply(old, delta, output, threads, as_json)


@app.command()
def fold(
    deltas: Annotated[list[Path], typer.Argument(help="Deltas in their order, each on top of the one before.")],
    output: Output,
    base: Annotated[Path | None, typer.Option(help="The first delta's base: needed for modes dense and idempotent.")] = None,
    mode: Mode = "default",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write one delta that does what several do one after another."""
    from towline.cli import delta_files

    delta_files.fold(deltas, output, base, mode, threads, as_json)


@app.command()
def show(delta: Delta, as_json: Json = False) -> None:
    """What a delta holds, from its tables. The streams aren't decoded: `apply` proves them."""
    from towline.cli import delta_files

    delta_files.show(delta, as_json)
