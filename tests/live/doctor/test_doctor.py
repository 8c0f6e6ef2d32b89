"""`towline doctor` finds what is wrong with a real bus, a real store and a run's settings, and says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from live.store.models import begun
from support.bundles import towline
from towline.bus.client import Bus
from towline.config import BusSettings, StoreSettings
from towline.doctor.bus import look_at_bus
from towline.doctor.store import look_at_store
from towline.local.servers import NatsServer
from towline.store import keys
from towline.store.objects import open_store

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"


async def of_bus(settings: BusSettings, run: str):
    return [finding async for finding in look_at_bus(settings, run)]


async def test_a_sound_bus_has_no_faults_before_and_after_the_run_has_streams(bus_settings, run_name):
    before = await of_bus(bus_settings, run_name)
    assert [finding.state for finding in before if finding.state != "ok"] == []
    assert any("no streams yet" in finding.what for finding in before)
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    try:
        await bus.ensure()
    finally:
        await bus.close()
    after = await of_bus(bus_settings, run_name)
    assert [finding.state for finding in after if finding.state != "ok"] == []
    assert any(finding.part == "clock" for finding in after)


async def test_a_bus_without_room_with_small_messages_or_out_of_reach_is_told(tmp_path, run_name):
    account = 'accounts { A { jetstream { max_file: 100MB, max_mem: 10MB }, users [ { user: "a", password: "b" } ] } }'
    server = NatsServer(tmp_path / "nats", max_payload_bytes=1 << 20, authorization=account)
    server.start()
    user = BusSettings(user="a", password="b", connect_timeout_seconds=0.3)
    try:
        found = await of_bus(server.settings(user), run_name)
        stranger = await of_bus(server.settings(BusSettings(user="a", password="c")), run_name)
    finally:
        server.stop()
    faults = [finding for finding in found if finding.state == "fault"]
    assert len(faults) == 1
    assert "the run wants 4,294,967,296" in faults[0].what
    assert "bus.budget_bytes" in faults[0].remedy
    assert ["max_payload" in finding.what for finding in found if finding.state == "warning"] == [True]
    gone = await of_bus(server.settings(user), run_name)
    assert [finding.state for finding in stranger] == ["fault"]
    assert "refuses the user" in stranger[0].what
    assert [finding.state for finding in gone] == ["fault"]
    assert "can't be reached" in gone[0].what


async def test_a_stream_that_fills_up_is_told(bus_settings, run_name):
    settings = bus_settings.model_copy(update={"budget_bytes": 64 << 20})
    bus = await Bus.connect(settings, run=run_name, client_name="test")
    try:
        await bus.ensure()
        for _ in range(6):
            await bus.publish(bus.topology.dead("test"), bytes(40_000))
        assert not any("full" in finding.what for finding in await of_bus(settings, run_name))
        limit = 0.02 * ((64 << 20) - 6 * (8 << 20))
        for _ in range(int(0.85 * limit / 40_000) - 6):
            await bus.publish(bus.topology.dead("test"), bytes(40_000))
    finally:
        await bus.close()
    told = [finding for finding in await of_bus(settings, run_name) if finding.state == "warning"]
    assert len(told) == 1
    assert "DEAD is 8" in told[0].what


def test_a_sound_store_and_one_with_wrong_keys_or_a_broken_log(s3_settings, run_name):
    assert [finding.state for finding in look_at_store(s3_settings, run_name)] == ["ok", "ok", "ok"]
    wrong = s3_settings.model_copy(update={"access_key": "nobody"})
    [refused] = list(look_at_store(wrong, run_name))
    assert refused.state == "fault"
    assert "keys" in refused.remedy
    open_store(s3_settings).create(keys.log_entry(run_name, 0), b"{}")
    broken = list(look_at_store(s3_settings, run_name))[-1]
    assert (broken.part, broken.state) == ("versions", "fault")
    assert "log entry 0" in broken.what


def test_a_version_whose_part_is_gone_is_named(tmp_path, run_name):
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    objects = open_store(settings)
    run = begun(objects, run_name)
    run.commit()
    head = run.log.version(run.commit())
    assert list(look_at_store(settings, run_name))[-1].state == "ok"
    objects.delete(f"{head.folder}/{keys.part_name(0)}")
    gone = list(look_at_store(settings, run_name))[-1]
    assert gone.state == "fault"
    assert f"version {head.number} lacks {keys.part_name(0)}" in gone.what


def test_the_command_names_faults_and_exits_1(tmp_path):
    shutil.copytree(DEMO.parent, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    toml = tmp_path / "mine" / "demo.toml"
    good = towline(tmp_path, "doctor", str(toml), "--json")
    assert good.returncode == 0, good.stdout + good.stderr
    answer = json.loads(good.stdout)
    assert answer["faults"] == 0
    assert {"machine", "code", "model", "engine", "bus", "store"} == {finding["part"] for finding in answer["findings"]}
    toml.write_text(toml.read_text().replace("sort_digits:reward", "sort_digits:rewrad"))
    bad = towline(tmp_path, "doctor", str(toml))
    assert bad.returncode == 1
    assert "FAULT   code:" in bad.stdout
    assert "has no 'rewrad'" in bad.stdout
    assert "-> " in bad.stdout


NO_TORCH = """
import json, sys
from pathlib import Path
sys.modules["torch"] = None  # as where it isn't installed
from towline.doctor.settings import look_at_settings
from towline.local.run_directory import find_run
directory, settings = find_run(sys.argv[1])
print(json.dumps([finding.plain() for finding in look_at_settings(settings, directory.path)]))
"""


@pytest.mark.parametrize(("apart", "state"), [(True, "warning"), (False, "fault")], ids=["apart", "here"])
def test_without_torch_a_machine_can_look_at_a_run_whose_services_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool, state: str
) -> None:
    if apart:
        monkeypatch.setenv("TOWLINE_BUS__URL", "nats://elsewhere:4222")
        monkeypatch.setenv("TOWLINE_STORE__URL", "s3://bucket/runs")
    done = subprocess.run([sys.executable, "-c", NO_TORCH, DEMO], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    findings = {finding["part"]: finding for finding in json.loads(done.stdout)}
    assert findings["engine"]["state"] == state
    assert "torch" in findings["engine"]["what"]
    assert {findings[part]["state"] for part in ("code", "model")} == {"ok"}


def test_without_a_run_the_machine_is_looked_at(tmp_path):
    done = towline(tmp_path, "doctor")
    assert done.returncode == 0, done.stdout
    assert "Python 3" in done.stdout
