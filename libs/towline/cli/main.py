"""The `towline` command. An error is one line, `code: message`, on stderr; the exit status is 2 for a wrong call, else 1.

Commands import what they need when they run: `towline --help` starts without a bus client, and nothing here needs torch.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from importlib import import_module
from importlib.metadata import version as installed_version
from typing import Annotated, Any, cast

import typer

from towline.cli import access, doctor, fork, replay, report, runs, top, trace, trajectories, versions
from towline.cli.paths import fault_of
from towline.errors import TowlineError, UsageError
from towline.runtime.terminal import say

INTERRUPTED = 130
WrongCall = cast(type[Exception], typer.BadParameter.__mro__[1])
"""What every fault of a command line is to typer, which exports only some of its kinds."""

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
        status = app(prog_name="towline", standalone_mode=False)  # else typer draws a wrong call as a box of several lines
    except TowlineError as error:
        _exit(f"{error.code}: {' '.join(error.message.split())}", error.exit_status)
    except WrongCall as error:
        _exit(_wrong_call(error), UsageError.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001 — kept whole in a file, one line for the user
        if isinstance(error, OSError) and (fault := fault_of(error)):
            _exit(f"file: {fault}", 1)
        with tempfile.NamedTemporaryFile("w", prefix="towline-", suffix=".traceback", delete=False) as file:
            traceback.print_exc(file=file)
        _exit(f"internal: {type(error).__name__}: {' '.join(str(error).split())}; the traceback is in {file.name}", 1)
    sys.exit(status if isinstance(status, int) else 0)


def _wrong_call(error: Any) -> str:
    """What typer found wrong with the command line. Where it has shown the help instead, there is nothing to say."""
    said = " ".join(error.format_message().split()).rstrip(".")
    if not said or type(error).__name__ == "NoArgsIsHelpError":
        return ""
    return f"usage: {said[0].lower()}{said[1:]}; see `{error.ctx.command_path if error.ctx else 'towline'} --help`"


def _exit(line: str, status: int) -> None:
    if line:
        say(line, error=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
