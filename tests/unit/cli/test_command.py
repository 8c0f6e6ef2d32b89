"""The command itself: what a wrong call says, and what starting it costs."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from towline.cli.main import app
from towline.cli.paths import fault_of, to_write
from towline.cli.runs import _overrides
from towline.config import load_settings
from towline.errors import UsageError
from towline.local.run_directory import RunDirectory

NOBODY = 65534

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


def towline(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("up", "nope.toml"), 2, "config_missing: nope.toml: no such file"),
        (("up",), 2, "config_missing: give one TOML file"),
        (("up", str(DEMO), "--set", "buffer.gruop_size=4"), 2, "buffer.gruop_size: unknown key"),
        (("up", str(DEMO), "--set", "steps=4"), 2, "override: --set 'steps=4': use SECTION.KEY=VALUE"),
        (("up", str(DEMO), "--run", "Not A Name"), 2, "run.name: use 1 to 32 of a-z"),
        (("up", str(DEMO), "--steps", "0"), 2, "run.steps"),
        (("status", "nope"), 2, "run_missing: no run 'nope'"),
        (("audit", "nope"), 2, "run_missing: no run 'nope'"),
        (("down", "nope"), 2, "run_missing: no run 'nope'"),
        (("serve", "trainre", "--config", str(DEMO)), 2, "service_name: service 'trainre': use one of buffer"),
        (("trajectories", "show", "nope", "x"), 2, "sample_name: 'x': use GROUP.SAMPLE"),
        (("up", str(DEMO), "--set", "trainer.learning_rate=nan"), 2, "trainer.learning_rate"),
        (("up", str(DEMO), "--set", "trainer.learning_rate=inf"), 2, "trainer.learning_rate"),
        (("up", str(DEMO), "--dp", "-1"), 2, "trainer.dp"),
        (("access", "s3", "--run", "r", "--out", "k", "--bucket", "A b"), 2, "--bucket 'A b': use 3 to 63"),
        (("access", "s3", "--run", "r", "--out", "k", "--prefix", "../x"), 2, "--prefix '../x': give what stands after"),
        (
            ("access", "sites", "--run", "r", "--site", "9b", "--home-url", "tls://h:1", "--out", "k"),
            2,
            "beginning with a letter",
        ),
        (("access", "sites", "--run", "r", "--site", "b", "--home-url", "foo", "--out", "k"), 2, "--home-url 'foo': give tls://"),
        (("access", "sites", "--run", "r", "--site", "b", "--home-url", "tls://h:x", "--out", "k"), 2, "give tls://HOST:PORT"),
        (("access", "nats", "--run", "r", "--account", "X Y", "--out", "k"), 2, "account 'X Y': use 1 to 32"),
        (("access", "nats", "--run", "r", "--out", __file__), 2, "there is a file of that name; give a folder"),
        (("access", "nats", "--run", "r", "--out", "/dev/null/k"), 2, "output: /dev/null/k: /dev/null is a file, and no folder"),
        (("loadtest", str(DEMO), "--set", "load.workers=-3"), 2, "load.workers: Input should be greater"),
        (("loadtest", str(DEMO), "--set", "load.lengths_from=nope"), 2, "load.lengths_from in "),
        (("loadtest", "compare", "nope", "nope"), 2, "result: nope: No such file or directory; give a result-NNN.json"),
        (("simulate", str(DEMO), "-o", f"{__file__}/x"), 2, f"output: {__file__}/x: {__file__} is a file, and no folder"),
        (("loadtest", "record", "nope", "--out", str(DEMO.parent)), 2, "is a folder; name the file to write"),
        (("trajectories", "export", "nope", "-o", "/dev/null/x"), 2, "output: /dev/null/x: /dev/null is a file, and no folder"),
        (("replay", "nope", "--to", "/dev/null/x"), 2, "output: /dev/null/x"),
        (("run", "report", "nope", "-o", "."), 2, "output: . is a folder; name the file to write"),
        (("run", "report", "nope", "-o", "x" * 300), 2, "File name too long; name another place"),
        (("up", "."), 2, "config_missing: .: a folder; give a run's TOML file"),
        (
            ("up", "/dev/null"),
            2,
            "config: /dev/null: [run] is missing; it needs name; [model] is missing; [prompts] is missing; it",
        ),
        (("up", str(DEMO), "--set", "run=3"), 2, "override: --set 'run=3'"),
        (("up", str(DEMO), "--set", "trainer.loss_arguments=3"), 2, "trainer.loss_arguments: must be a table"),
        (("up", str(DEMO), "--set", "bus.url=nats://127.0.0.1:x"), 2, "bus: url: write nats://HOST:PORT"),
        (
            ("up", str(DEMO), "--set", "run.directory=/dev/null/x"),
            2,
            "run_directory: run.directory: /dev/null/x/demo can't be made",
        ),
        (("up", str(DEMO), "--set", "trainer.device=bogus"), 2, "device: trainer.device = 'bogus': there is no such device"),
        (("up", str(DEMO), "--set", "rollout.device=cuda:99"), 2, "device: rollout.device = 'cuda:99': torch finds"),
        (("loadtest", "nope.toml"), 2, "config_missing: nope.toml: no such file; loadtests/ has scenarios"),
        (("loadtest", str(DEMO), "--set", "load.bogus=3"), 2, "load.bogus: unknown key; remove it or correct its spelling"),
        (("serve", "buffer", "--config", str(DEMO), "--set", "x=1"), 2, "override: --set 'x=1'"),
        (
            ("serve", "buffer", "--config", str(DEMO), "--set", "rollout.arguments.K=1"),
            2,
            "--set 'rollout.arguments = { KEY = VALUE }'",
        ),
        (("serve", "buffer", "--config", str(DEMO), "--set", "buffer.bogus=1"), 2, "buffer.bogus: unknown key"),
        (("access", "s3", "--run", "A B", "--out", "k"), 2, "run_name: run name 'A B': use 1 to 32"),
        (("access", "nats", "--run", "A B", "--out", "k"), 2, "run_name: run name 'A B': use 1 to 32"),
        (("access", "show", "gc", "--run", "A B"), 2, "run_name: run name 'A B': use 1 to 32"),
        (("versions", "quarantine", "nope", "5", "--reason", " "), 2, "reason: --reason: say why"),
        (("frobnicate",), 2, "usage: no such command 'frobnicate'; see `towline --help`"),
        (("statu", "demo"), 2, "usage: no such command 'statu'. Did you mean 'status'?; see `towline --help`"),
        (("status",), 2, "usage: missing argument 'RUN_OR_TOML'; see `towline status --help`"),
        (("trajectories", "list", "nope", "--limit", "0"), 2, "usage: invalid value for '--limit'"),
        (("trace", "nope", "1.0", "--bogus"), 2, "usage: no such option: --bogus; see `towline trace --help`"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_2_and_leaves_nothing(tmp_path, arguments, code, says):
    done = towline(*arguments, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert not list(tmp_path.glob("*.traceback"))


def test_a_folder_that_is_no_runs_is_called_what_it_is(tmp_path):
    for name in ("bundle", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    for target in ("bundle", "./bundle"):
        done = towline("audit", target, cwd=tmp_path)
        assert (done.returncode, done.stderr.splitlines()[0].split(",")[0]) == (2, "run_bundle: bundle is a bundle")
    done = towline("audit", "./other", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2, "run_missing: other is a folder, and no run's; give a run's name or its TOML file\n",
    )  # fmt: skip


def test_without_a_command_the_help_is_shown(tmp_path):
    for arguments in ((), ("versions",)):
        done = towline(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, "")
        assert "Usage: towline" in done.stdout


def test_every_option_that_names_an_output_is_looked_at_before_the_work():
    found = {name: one for name, one in parameters(typer.main.get_command(app)) if {"-o", "--out", "--output"} & set(one.opts)}
    assert len(found) >= 10
    for name, one in found.items():
        with pytest.raises(UsageError, match="/dev/null is a file, and no folder"):
            one.callback(None, one, Path("/dev/null/x"))
        assert one.callback(None, one, Path("new/x")) == Path("new/x"), name


@pytest.fixture
def anybody():
    """Runs a check as a user who may not write everywhere: root, whom nothing is shut to, runs it as another one."""

    def run(check):
        if os.geteuid() != 0:
            check()
            return
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                check()
            except BaseException:  # noqa: BLE001  a forked child must not go on as pytest
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    return run


def test_an_output_that_may_not_be_written_is_refused(anybody):
    def check():
        with pytest.raises(UsageError, match="you may not write into"):
            to_write(shut / "x")

    with tempfile.TemporaryDirectory() as folder:  # tmp_path is for its owner alone
        os.chmod(folder, 0o755)
        shut = Path(folder) / "shut"
        shut.mkdir(mode=0o555)
        anybody(check)


def test_a_fault_of_a_path_that_the_user_named_needs_no_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["status", "demo", "--set=run.directory=/data/x", "-o", "out/a"]
    for path in ("out/a", "out/.a.123.tmp", "out/a/parts/0", "out", "/data/x/demo", "demo"):
        assert fault_of(FileNotFoundError(errno.ENOENT, "No such file or directory", path), words) == (
            f"{path}: No such file or directory; correct the path"
        )
    for path in ("/usr/lib/python3/x.py", "other/b"):
        assert fault_of(FileNotFoundError(errno.ENOENT, "No such file or directory", path), words) is None
        assert (
            fault_of(PermissionError(errno.EACCES, "Permission denied", path), words)
            == f"{path}: Permission denied; correct the path"
        )
    assert fault_of(NotADirectoryError(errno.ENOTDIR, "Not a directory", "out/a/b"), words) == (
        "out/a/b: a file stands where a folder is wanted; correct the path"
    )
    assert (
        fault_of(OSError(errno.ENOSPC, "No space left on device"), words) == "No space left on device; make some, and try again"
    )
    assert fault_of(OSError(errno.EIO, "Input/output error"), words) is None


def test_serve_hands_settings_on_to_the_service(tmp_path):
    code = """
import json, os, sys, towline.cli.main as m, towline.cli.runs as r
from pathlib import Path
from towline.config import load_settings
def execute(program, command):
    settings = load_settings(Path(command[command.index("--config") + 1]))
    print(json.dumps([command[1:], settings.buffer.group_size, settings.rollout.arguments, settings.run.seed, settings.bus.url]))
    sys.exit(0)
r.os.execv = execute
m.main()
"""
    arguments = ["serve", "rollout-worker", "--config", str(DEMO), "--replica", "w-3", "--set", "buffer.group_size=4"]
    arguments += [
        "--set",
        "rollout.arguments={ Mean__Tokens = 60 }",
        "--set",
        "run.seed=1",
        "--set",
        "run.seed=7",
        "--set",
        "bus.url=nats://h:1",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=os.environ | {"TOWLINE_RUN__SEED": "3"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    command = ["-m", "towline.rollout_worker", "--config", str(DEMO), "--replica", "w-3"]
    assert json.loads(done.stdout) == [command, 4, {"Mean__Tokens": 60}, 7, "nats://h:1"]


@pytest.mark.parametrize(
    ("options", "named"),
    [(("--keys-folder", "keys"), "--keys-folder"), (("--endpoint", "http://h:1", "--region", "x"), "--endpoint, --region"),
     (("--ca", "ca.pem"), "--ca")],
)  # fmt: skip
def test_what_a_folder_or_a_toml_as_a_mirror_cant_use_is_refused(tmp_path, options, named):
    runs = tmp_path / "run.toml"
    runs.write_text(DEMO.read_text().replace("# No [bus]", f'[store]\nurl = "file://{tmp_path}/home"\n# No [bus]'))
    for target, says in (
        (f"file://{tmp_path}/copy", "is a folder, which has no keys and no server"),
        (str(DEMO), "names DST whole"),
    ):
        done = towline("store", "mirror", str(runs), target, *options, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (2, f"mirror_target: {target} {says}: leave {named} out\n")
        assert not (tmp_path / "copy").exists()


def parameters(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, f"{path} {name}")
    yield from ((f"{path} {parameter.name}", parameter) for parameter in command.params)


NUMBERS = [
    (name, one) for name, one in parameters(typer.main.get_command(app)) if one.bare_type() in ("int", "float", "list[int]")
]
CHECKED_AS_SETTINGS = {" up steps", " up dp", " up tp", " up pp"}


@pytest.mark.parametrize(("name", "parameter"), NUMBERS, ids=[name.strip() for name, _ in NUMBERS])
def test_an_option_takes_no_negative_number_and_none_that_isnt_one(name: str, parameter: Any) -> None:
    assert name in CHECKED_AS_SETTINGS or parameter.min >= 0
    if parameter.bare_type() == "float":
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(typer.BadParameter):
                parameter.callback(None, parameter, value)
        assert parameter.callback(None, parameter, 1.5) == 1.5


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "fast"])
def test_a_speed_that_is_no_number_is_a_wrong_call(tmp_path, value):
    done = towline("replay", "nope", "--to", "screen", "--speed", value, cwd=tmp_path)
    assert done.returncode == 2
    assert "--speed" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_where_no_run_ever_was_the_list_says_so(tmp_path):
    assert towline("run", "list", cwd=tmp_path).stdout == "no run was ever up in runs\n"
    assert towline("run", "list", "--json", cwd=tmp_path).stdout == "[]\n"


def test_starting_the_command_imports_neither_torch_nor_a_client(tmp_path):
    heavy = ("torch", "transformers", "nats", "minio", "numba", "numpy", "structlog", "pydantic")
    code = f"import sys, towline.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_run_whose_own_servers_are_down_is_called_that(tmp_path):
    directory = RunDirectory(tmp_path / "runs" / "demo")
    nats = directory.nats()
    nats.folder.mkdir(parents=True)
    nats._write({"ports": {"client": 9, "monitor": 10}, "pid": 0, "created": 0.0})
    directory.save(load_settings(DEMO, {"bus.url": nats.url, "store.url": (tmp_path / "store").as_uri()}), DEMO)
    for command in (("top", "demo"), ("init", "demo")):
        done = towline(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("run_down: run demo isn't up; `towline up`")
    assert towline("status", "demo", cwd=tmp_path).stdout == "run demo is stopped; `towline up` goes on with it\n"
    directory.summary_path.write_text("{}")
    assert towline("status", "demo", cwd=tmp_path).stdout == "run demo is finished; `towline run list` has its outcome\n"


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept(tmp_path):
    code = "import towline.cli.main as m, towline.cli.runs as r; r.os.execv = lambda *a: 1 / 0; m.main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "buffer", "--config", "x"], cwd=tmp_path, env={"TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    line = done.stderr.strip()
    assert line.startswith("internal: ZeroDivisionError: division by zero; the traceback is in ")
    assert "\n" not in line
    assert "ZeroDivisionError" in Path(line.rpartition(" ")[2]).read_text()


def test_overrides_are_read_as_toml_where_they_are():
    assert _overrides(["a.b=3", "a.c=true", "a.d=text", "a.e=[1, 2]", 'a.f={x = "y"}', "a.g=nats://h:1"]) == {
        "a.b": 3, "a.c": True, "a.d": "text", "a.e": [1, 2], "a.f": {"x": "y"}, "a.g": "nats://h:1",
    }  # fmt: skip
    with pytest.raises(UsageError):
        _overrides(["a=3"])
