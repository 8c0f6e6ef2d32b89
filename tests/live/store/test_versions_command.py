"""`towline versions` on a real store: what it prints is true, what it writes is whole, and a refusal is one line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import structlog
from typer.testing import CliRunner

from towline.bus.client import Bus
from towline.bus.topology import ACKS, REPLICAS
from towline.cli import collecting
from towline.cli.main import app
from towline.config import BusSettings, StoreSettings
from towline.contract.codec import encode
from towline.contract.control import EndRecord
from towline.contract.policy import Ack, ReplicaInfo
from towline.delta.files import load_folder
from towline.errors import ConflictError, CorruptError, MissingError, TowlineError, UnavailableError, UsageError
from towline.store.anchors import record_anchor, upload_anchor
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.store.portable import export_versions, import_versions
from towline.store.versions import materialize

from .models import OTHERS, Run, begun, same

TOML = """
[run]
name = "{name}"
[store]
url = "{url}"
endpoint = "{endpoint}"
access_key = "{access}"
secret_key = "{secret}"
[model]
source = "somewhere"
[prompts]
source = "some.module:prompts"
[sampling]
max_tokens = 4
[reward]
function = "some.module:reward"
"""


def settings_file(folder: Path, name: str, store: StoreSettings) -> Path:
    path = folder / f"{name}.toml"
    secret = store.secret_key.get_secret_value()
    path.write_text(TOML.format(name=name, url=store.url, endpoint=store.endpoint, access=store.access_key, secret=secret))
    return path


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()  # the command silences it


@pytest.fixture
def run(objects: ObjectStore, run_name: str) -> Run:
    """Versions 2 to 7, anchors of 3 and 5."""
    run = begun(objects, run_name)
    for _ in range(6):
        run.commit()
    for number in (3, 5):
        record_anchor(objects, run_name, upload_anchor(objects, run_name, number, new_write_id(), run.states[number]))
    run.log.write_hint([3, 5])
    return run


@pytest.fixture
def toml(run: Run, tmp_path: Path, store_settings: StoreSettings) -> str:
    return str(settings_file(tmp_path, run.log.run, store_settings))


def towline(*arguments: str) -> Any:
    """The JSON that it prints; its refusal is raised."""
    result = CliRunner().invoke(app, ["versions", *arguments, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_gc_pins_and_quarantine_from_the_command_line(toml: str, run: Run) -> None:
    assert towline("pin", toml, "2", "--name", "paper") == {"version": 2, "name": "paper", "new": True}
    assert [row["version"] for row in towline("list", toml) if row["pins"]] == [2]
    dry = towline("gc", toml, "--dry-run")
    assert {(row["kind"], row["version"]) for row in dry["verdicts"] if row["action"] == "condemn"} == {("version", 3)}
    assert all(row["reason"] for row in dry["verdicts"])
    assert towline("gc", toml)["condemned"] == 1
    again = towline("gc", toml, "--grace", "0s")
    assert (again["deleted"], again["lost"]) == (1, {})
    assert towline("unpin", toml, "2", "--name", "paper") == {"version": 2, "name": "paper"}
    with pytest.raises(MissingError, match="no pin"):
        towline("unpin", toml, "2", "--name", "paper")
    towline("gc", toml)
    assert towline("gc", toml, "--grace", "0s")["deleted"] == 1
    results = {row["version"]: row for row in towline("verify", toml)}
    assert all(row["ok"] for row in results.values())
    assert [version for version, row in results.items() if row["problem"]] == [2]
    with pytest.raises(MissingError) as gone:
        towline("pin", toml, "2")
    assert gone.value.code == "version_gone"
    assert towline("quarantine", toml, "6", "--reason", "reward hacked") == {"version": 6, "entry": 8, "latest": 5}
    assert towline("quarantine", toml, "7", "--reason", "twice")["entry"] is None


def test_a_materialised_version_is_a_whole_hugging_face_folder_or_nothing(toml: str, run: Run, tmp_path: Path) -> None:
    made = towline("materialize", toml, "6", "-o", str(tmp_path / "six"))
    assert made["model_digest"] == run.log.version(6).model_digest
    assert same(load_folder(tmp_path / "six"), run.states[6])
    assert {name: (tmp_path / "six" / name).read_bytes() for name in OTHERS} == OTHERS
    assert list(run.objects.list(f"{run.log.run}/holds/")) == []
    with pytest.raises(UsageError, match="exists already"):
        towline("materialize", toml, "6", "-o", str(tmp_path / "six"))
    manifest = next(i.key for i in run.objects.list(run.log.version(7).folder) if i.key.endswith("part-00000.safetensors"))
    run.objects.put(manifest, b"junk")
    with pytest.raises(CorruptError, match="part-00000"):
        towline("materialize", toml, "7", "-o", str(tmp_path / "seven"))
    assert not [path for path in tmp_path.iterdir() if "seven" in path.name]


def test_an_export_comes_back_in_another_run(toml: str, run: Run, tmp_path: Path, store_settings: StoreSettings) -> None:
    out = tmp_path / "out"
    assert towline("export", toml, "3..6", "-o", str(out))["versions"] == [3, 4, 5, 6]
    other = str(settings_file(tmp_path, f"{run.log.run}-b", store_settings))
    done = towline("import", other, str(out))
    assert done["versions"] == {"3": 0, "4": 2, "5": 3, "6": 4}
    assert towline("import", other, str(out)) == done  # a repeat changes nothing
    log = Log(run.objects, f"{run.log.run}-b")
    log.refresh()
    for old, new in done["versions"].items():
        assert same(materialize(run.objects, log, new), run.states[int(old)])
    assert [log.lineage.depth(number) for number in (0, 2, 3, 4)] == [0, 1, 2, 3]
    single = tmp_path / "single"
    towline("export", toml, "4", "-o", str(single))
    with pytest.raises(ConflictError, match="new name"):
        towline("import", other, str(single))
    with pytest.raises(UsageError, match=r"the first version is the lesser one: 4\.\.6"):
        towline("export", toml, "6..4", "-o", str(tmp_path / "wrong"))
    run.fork(4)
    aside = run.commit()
    with pytest.raises(UsageError, match=f"version {aside} doesn't stand on version 6"):
        towline("export", toml, f"6..{aside}", "-o", str(tmp_path / "wrong"))
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("victim", ["base/model.safetensors", "versions/00000005/part-00000.safetensors", "base/config.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_export_is_refused_by_name(
    file_store_settings: StoreSettings, tmp_path: Path, victim: str, damage: str
) -> None:
    objects = open_store(file_store_settings)
    run = begun(objects, "source")
    for _ in range(4):
        run.commit()
    out = tmp_path / "out"
    export_versions(objects, run.log, 3, 5, out)
    data = bytearray((out / victim).read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        (out / victim).unlink()
    else:
        (out / victim).write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(TowlineError, match=Path(victim).name):
        import_versions(objects, Log(objects, "target"), out)
    assert list(objects.list("target/")) == []


def _add_bus(toml: Path, bus: BusSettings) -> None:
    toml.write_text(f'{toml.read_text()}[bus]\nurl = "{bus.url}"\nbudget_bytes = {bus.budget_bytes}\n')


async def test_registered_replicas_hold_their_versions_and_their_prepares_lengthen_the_grace(
    toml: str, run: Run, bus_settings: BusSettings
) -> None:
    bus = await Bus.connect(bus_settings, run=run.log.run, client_name="test")
    try:
        await bus.ensure()
        info = ReplicaInfo(replica="w1", host="h", engine="e", slots=1, busy=0, state="serving", version=2, at=0.0)
        await bus.kv(REPLICAS).put("w1", encode(info))
        ack = Ack(
            replica="w1", version=2, files_digest="d", engine_digest=None, probe_max_abs_diff=None, probe_tolerance=None,
            prepare_seconds=2000.0, pause_seconds=0.0, wire_bytes=0, mode="initial", at=0.0,
        )  # fmt: skip
        await bus.kv(ACKS).put("w1", encode(ack))
        await asyncio.to_thread(_add_bus, Path(toml), bus_settings)
        found = await asyncio.to_thread(towline, "gc", toml, "--dry-run")
    finally:
        await bus.close()
    assert (found["registry"], found["holds"], found["grace_seconds"]) == ("read", ["replica-w1"], 8000.0)
    kept = {row["version"]: row["reason"] for row in found["verdicts"] if row["kind"] == "version"}
    assert "held by replica-w1" in kept[2]
    assert "held by replica-w1" in kept[3]


def _following(toml: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "towline.cli.main", "versions", "gc", toml, "--every", "0.2", "--grace", "0s", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _passes(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


async def test_gc_by_itself_collects_until_the_run_has_ended(toml: str, run: Run, bus_settings: BusSettings) -> None:
    bus = await Bus.connect(bus_settings, run=run.log.run, client_name="test")
    try:
        await bus.ensure()
        await asyncio.to_thread(_add_bus, Path(toml), bus_settings)
        process = _following(toml)
        try:
            passes = _passes(process)
            first = await asyncio.to_thread(next, passes)
            second = await asyncio.to_thread(next, passes)
            assert (first["condemned"], first["deleted"], second["condemned"], second["deleted"]) == (2, 0, 0, 2)
            assert (first["registry"], first["waiting"], second["lost"], second["run_ended"]) == ("read", 2, {}, False)
            end = EndRecord(writer="b/1", reason="end_of_data", depth=7)
            await bus.publish(bus.topology.control("end"), encode(end))
            last = (await asyncio.to_thread(list, passes))[-1]
            assert last["run_ended"]
            assert await asyncio.to_thread(process.wait, 60) == 0
        finally:
            process.kill()
            process.wait()
    finally:
        await bus.close()


def test_gc_by_itself_ends_on_sigterm_and_outlives_a_store_that_is_away(
    file_store_settings: StoreSettings, run_name: str, tmp_path: Path
) -> None:
    run = begun(open_store(file_store_settings), run_name)
    run.commit()
    process = _following(str(settings_file(tmp_path, run_name, file_store_settings)))
    try:
        passes = _passes(process)
        assert next(passes)["registry"] == "unreachable"
        process.terminate()
        list(passes)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    told: list[str] = []

    def away() -> NoReturn:
        told.append("asked")
        if len(told) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        raise UnavailableError("the store is away", code="store_unavailable")

    collecting._follow(0.01, away, True)
    assert len(told) == 3


def test_refusals_are_one_line(toml: str) -> None:
    for arguments in (
        ["show", toml, "99"],
        ["pin", toml, "99"],
        ["export", toml, "a..b", "-o", "/nowhere/x"],
        ["gc", toml, "--grace", "soon"],
        ["gc", toml, "--every", "5", "--dry-run"],
    ):
        with pytest.raises(TowlineError) as caught:
            towline(*arguments)
        assert "\n" not in caught.value.message
