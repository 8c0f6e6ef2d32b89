"""The command itself: what a wrong call says, and what starting it costs."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from towline.cli.main import app
from towline.cli.runs import _overrides
from towline.errors import UsageError

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


def towline(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "towline.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


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
        (("access", "nats", "--run", "r", "--out", "/dev/null/k"), 2, "no folder can be made there"),
        (("loadtest", str(DEMO), "--set", "load.workers=-3"), 2, "load.workers: Input should be greater"),
        (("loadtest", str(DEMO), "--set", "load.lengths_from=nope"), 2, "load.lengths_from in "),
        (("loadtest", "compare", "nope", "nope"), 2, "result: nope: No such file or directory; give a result-NNN.json"),
        (
            ("simulate", str(DEMO), "--set", "load.workers=1", "--until", "1", "-o", f"{__file__}/x"),
            1,
            "a file stands where a folder",
        ),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_2(tmp_path, arguments, code, says):
    done = towline(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr + done.stdout


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


def test_an_unknown_command_is_a_wrong_call(tmp_path):
    done = towline("frobnicate", cwd=tmp_path)
    assert done.returncode == 2
    assert "frobnicate" in done.stderr


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
