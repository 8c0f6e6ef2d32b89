"""`towline delta` on files and folders: what it prints, what it refuses, and that it leaves no half output."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from towline.cli.delta import app
from towline.delta.files import load_model, save_folder, write_safetensors
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.errors import CorruptError, MissingError, TowlineError, UsageError
from unit.delta.states import random_state, same, step, tensor

runner = CliRunner()


def call(*arguments: object) -> dict[str, object]:
    result = runner.invoke(app, [*map(str, arguments), "--json"])
    if result.exception is not None:
        raise result.exception
    out: dict[str, object] = json.loads(result.stdout)
    return out


@pytest.fixture
def models(tmp_path: Path) -> list[ModelState]:
    """a.safetensors, b (a sharded folder), c.safetensors: three states in a row."""
    rng = np.random.default_rng(41)
    states = [random_state(rng, 20)]
    states += [step(rng, states[0])]
    states += [step(rng, states[1])]
    write_safetensors(states[0], tmp_path / "a.safetensors", {"format": "pt"})
    save_folder(states[1], tmp_path / "b", 4000)
    (tmp_path / "b" / "config.json").write_text("{}")
    write_safetensors(states[2], tmp_path / "c.safetensors")
    return states


@pytest.mark.parametrize("mode", ["default", "dense", "idempotent"])
def test_diff_apply_and_fold(tmp_path: Path, models: list[ModelState], mode: str) -> None:
    a, b, c = tmp_path / "a.safetensors", tmp_path / "b", tmp_path / "c.safetensors"
    one = call("diff", a, b, "-o", tmp_path / "d1", "--mode", mode)
    call("diff", b, c, "-o", tmp_path / "d2", "--mode", mode)
    assert one["wire_bytes"] == sum(path.stat().st_size for path in (tmp_path / "d1").iterdir())
    assert one["model_digest"] == model_digest(tensor_digests(models[1]))
    assert one["model_bytes"] == sum(t.spec.nbytes for t in models[0].values())
    call("apply", a, tmp_path / "d1", "-o", tmp_path / "b2.safetensors")
    assert same(load_model(tmp_path / "b2.safetensors"), models[1])
    applied = call("apply", b, tmp_path / "d2", "-o", tmp_path / "c2")
    assert same(load_model(tmp_path / "c2"), models[2])
    assert applied["model_digest"] == model_digest(tensor_digests(models[2]))
    assert (tmp_path / "c2" / "config.json").read_text() == "{}"
    base = [] if mode == "default" else ["--base", a, "--mode", mode]
    call("fold", tmp_path / "d1", tmp_path / "d2", "-o", tmp_path / "d", *base)
    call("apply", a, tmp_path / "d", "-o", tmp_path / "c3.safetensors")
    assert same(load_model(tmp_path / "c3.safetensors"), models[2])


def test_show_says_what_is_in_it(tmp_path: Path, models: list[ModelState]) -> None:
    made = call("diff", tmp_path / "a.safetensors", tmp_path / "b", "-o", tmp_path / "d")
    shown = call("show", tmp_path / "d")
    for name in ("wire_bytes", "model_bytes", "changed", "elements", "density"):
        assert shown[name] == made[name]
    rows = {row["name"]: row for row in shown["tensors"]}  # type: ignore[attr-defined]
    assert {name: row["checksum"] for name, row in rows.items()} == tensor_digests(models[1])
    assert {name: (row["dtype"], tuple(row["shape"])) for name, row in rows.items()} == {
        name: (t.spec.dtype, t.spec.shape) for name, t in models[1].items()
    }
    text = runner.invoke(app, ["show", str(tmp_path / "d")]).stdout
    assert "mode" in text
    assert "default" in text


def refused(error: type[TowlineError], message: str, *arguments: object) -> None:
    with pytest.raises(error, match=message):
        call(*arguments)


def test_refusals_name_the_tensor_and_leave_nothing(tmp_path: Path, models: list[ModelState]) -> None:
    a, b, c = tmp_path / "a.safetensors", tmp_path / "b", tmp_path / "c.safetensors"
    delta = tmp_path / "d"
    call("diff", a, b, "-o", delta)
    before = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / "out.safetensors"
    refused(CorruptError, "tensor 'layer", "apply", c, delta, "-o", out)
    extra = tmp_path / "extra.safetensors"
    write_safetensors({**models[0], "z": tensor("z", "U8", (1,), b"a")}, extra)
    refused(CorruptError, "tensor 'z' isn't whole", "apply", extra, delta, "-o", out)
    refused(UsageError, "tensor 'z' is only in the new state", "diff", a, extra, "-o", tmp_path / "d3")
    extra.unlink()
    (part,) = delta.iterdir()
    data = part.read_bytes()
    for damaged in (data[:-1], data[: len(data) // 2], data[:200] + b"\xff" + data[201:], b""):
        part.write_bytes(damaged)
        refused(CorruptError, "part|header|table|stream", "apply", a, delta, "-o", out)
        refused(CorruptError, "part|header|table|stream", "fold", delta, delta, "-o", tmp_path / "d3")
    part.write_bytes(data)
    refused(UsageError, "exists already", "apply", a, delta, "-o", c)
    refused(UsageError, "exists already", "diff", a, b, "-o", delta)
    refused(UsageError, "unknown delta mode", "diff", a, b, "-o", tmp_path / "d3", "--mode", "best")
    refused(UsageError, "give --base", "fold", delta, "-o", tmp_path / "d3", "--mode", "dense")
    refused(UsageError, "don't follow each other", "fold", delta, delta, "-o", tmp_path / "d3")
    refused(MissingError, "no delta folder", "show", tmp_path / "none")
    refused(MissingError, "isn't a delta", "show", b)
    refused(MissingError, "no file", "diff", tmp_path / "none", b, "-o", tmp_path / "d3")
    refused(MissingError, "no folder", "apply", a, delta, "-o", tmp_path / "none" / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    part.rename(delta / "part-00001.safetensors")
    refused(CorruptError, "lacks part-00000", "apply", a, delta, "-o", out)


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command's own entry point in a process of its own, after `code`."""
    start = f"import os, resource, signal, sys\n{code}\nfrom towline.cli.main import main\nmain()"
    command = [sys.executable, "-c", start, "delta", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, models: list[ModelState]) -> None:
    a, b, delta = tmp_path / "a.safetensors", tmp_path / "b", tmp_path / "d"
    call("diff", a, b, "-o", delta)
    before = sorted(path.name for path in tmp_path.iterdir())
    # A limit on file sizes fails a write as a full disk does, with another number.
    full = "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))"
    for arguments in (
        ("apply", a, delta, "-o", tmp_path / "file.safetensors"),
        ("diff", a, b, "-o", tmp_path / "d2"),
        ("fold", delta, "-o", tmp_path / "d2"),
    ):
        done = python(full, *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith("disk_full: there is no room to write ")
        assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", ["apply-file", "apply-folder", "diff"])
def test_a_command_killed_before_its_end_leaves_no_output_and_runs_again(
    tmp_path: Path, models: list[ModelState], command: str
) -> None:
    a, b, c = tmp_path / "a.safetensors", tmp_path / "b", tmp_path / "c.safetensors"
    call("diff", a, b, "-o", tmp_path / "d1")
    call("diff", b, c, "-o", tmp_path / "d2")
    out = tmp_path / "out"
    arguments = {
        "apply-file": ("apply", a, tmp_path / "d1", "-o", out),
        "apply-folder": ("apply", b, tmp_path / "d2", "-o", out),
        "diff": ("diff", a, b, "-o", out),
    }[command]
    # Killed when everything is written and nothing is renamed yet, and when only parts of a folder are.
    for victim in ("replace", "rename"):
        done = python(f"os.{victim} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)", *arguments)
        if (command, victim) == ("apply-file", "rename"):
            assert done.returncode == 0  # a file takes its place by os.replace alone
            out.unlink()
            continue
        assert done.returncode == -signal.SIGKILL
        assert not out.exists()
    call(*arguments)
    if command == "diff":
        call("apply", a, out, "-o", tmp_path / "again.safetensors")
        out = tmp_path / "again.safetensors"
    assert same(load_model(out), models[2 if command == "apply-folder" else 1])
