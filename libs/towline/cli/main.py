"""The `towline` command. An error is one line, `code: message`, on stderr; the exit status is 2 for a wrong call, else 1.

Commands import what they need when they run: `towline --help` starts without a bus client, and nothing here needs torch.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from importlib import import_module
from importlib.metadata import version as installed_version
from typing import Annotated

import typer

from towline.cli import access, doctor, fork, replay, report, runs, top, trace, trajectories, versions
from towline.errors import TowlineError
from towline.runtime.terminal import say

INTERRUPTED = 130

app = typer.Typer(
    help="Reinforcement-learning post-training with the trainer and the rollout fleet as separate services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("up")(runs.up)
app.command("down")(runs.down)
app.command("status")(runs.status)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.command("audit")(runs.audit)
app.command("serve", context_settings={"allow_extra_args": False})(runs.serve)
app.command("replay")(replay.replay)
app.command("trace")(trace.trace)
app.command("ui")(import_module("towline.cli.ui").ui)
app.command("loadtest")(import_module("towline.cli.loadtest").loadtest)
app.command("simulate")(import_module("towline.cli.simulate").simulate)
app.command("init")(access.init)
access.app.command("sites")(import_module("towline.cli.sites").sites)
runs.app.command("report")(report.report)
runs.app.command("fork")(fork.fork)
app.add_typer(runs.app, name="run")
app.add_typer(access.app, name="access")
app.add_typer(versions.app, name="versions")
app.add_typer(trajectories.app, name="trajectories")
app.add_typer(import_module("towline.cli.delta").app, name="delta")
app.add_typer(import_module("towline.cli.bridge").app, name="bridge")
app.add_typer(import_module("towline.cli.store").app, name="store")
app.add_typer(import_module("towline.cli.dead").app, name="dead")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"towline {installed_version('towline')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def main() -> None:
    """The entry point: no traceback reaches the screen."""
    try:
        app()
    except TowlineError as error:
        _exit(f"{error.code}: {' '.join(error.message.split())}", error.exit_status)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 — kept whole in a file, one line for the user
        with tempfile.NamedTemporaryFile("w", prefix="towline-", suffix=".traceback", delete=False) as file:
            traceback.print_exc(file=file)
        if isinstance(error, OSError) and error.filename is not None:  # a path of the user's, mostly
            _exit(f"file: {error.filename}: {_reason(error)}; correct the path; the traceback is in {file.name}", 1)
        _exit(f"internal: {type(error).__name__}: {' '.join(str(error).split())}; the traceback is in {file.name}", 1)


def _reason(error: OSError) -> str:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "a file stands where a folder is wanted"
    return error.strerror or type(error).__name__


def _exit(line: str, status: int) -> None:
    say(line, error=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
