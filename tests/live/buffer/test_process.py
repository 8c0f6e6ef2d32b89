"""The buffer as a process: killed again and again, on standby, stopped in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from live.buffer.harness import Fleet, Trainer, connected, records, seed, settings_for, working
from support.waiting import until
from towline.audit.run import audit
from towline.bus.client import Bus
from towline.bus.topology import LEASE_TTL_SECONDS, LEASES, STATUS
from towline.config import BusSettings, Settings, StoreSettings
from towline.contract.control import BatchRecord, EndRecord, WriterRecord
from towline.store.log import Log

TESTS = Path(__file__).parents[2]
Spawn = Callable[..., Any]


def write_toml(path: Path, settings: Settings) -> Path:
    """What the process needs of the settings; JSON's values are TOML's."""
    sections = settings.model_dump(mode="json", exclude_unset=True)
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines.extend(f"{key} = {json.dumps(value)}" for key, value in values.items() if not isinstance(value, dict | type(None)))
    path.write_text("\n".join(lines))
    return path


@asynccontextmanager
async def buffer_process(config: Path, replica: str = "0") -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "towline.buffer", "--config", str(config), "--replica", replica,
        env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def status(bus: Bus, replica: str = "0") -> dict[str, Any]:
    data = await bus.kv(STATUS).get(f"buffer.{replica}")
    found: dict[str, Any] = msgspec.json.decode(data) if data else {"figures": {}}
    return found


@pytest.mark.parametrize("staleness", [1])
async def test_kill_9_at_any_time_loses_nothing_that_was_admitted(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path, staleness: int
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, run={"name": run_name, "steps": 12}, buffer={
        "group_size": 2, "groups_per_batch": 2, "max_staleness": staleness, "snapshot_every_records": 40})  # fmt: skip
    config = write_toml(tmp_path / "run.toml", settings)
    async with connected(settings) as (bus, objects), working(Fleet(bus, objects, settings, fail_every=6)):
        await seed(objects, run_name)
        trainer = Trainer(bus, objects, settings)
        training = asyncio.create_task(trainer.train(until_depth=12))
        for kill_after in (1, 4, 7):
            async with buffer_process(config) as process:
                await until(lambda after=kill_after: len(trainer.batches) >= after)  # type: ignore[misc]
                process.kill()
        async with buffer_process(config) as process:
            await training

            async def finished() -> bool:
                return bool((await status(bus))["figures"].get("finished"))

            await until(finished)
            figures = (await status(bus))["figures"]
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60.0) == 0
        report = await audit(bus, Log(objects, run_name), settings)
        standing = await records(bus)
    assert report.clean, report.lines()
    assert (report.depth, report.counts.trained, report.counts.open) == (12, 48, 0)
    assert len([record for record in standing if isinstance(record, BatchRecord)]) == 12
    assert sum(isinstance(record, WriterRecord) for record in standing) == 4
    assert sum(isinstance(record, EndRecord) for record in standing) == 1
    assert (figures["trained"], figures["open"], figures["end_reason"]) == (48, 0, "steps")
    assert figures["dropped"] == report.counts.dropped
    assert figures["admitted"] == report.counts.admitted


async def test_a_standby_waits_its_turn_and_hanging_states_have_a_name(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    config = write_toml(tmp_path / "run.toml", settings)
    async with connected(settings) as (bus, objects), buffer_process(config) as first:

        async def says(replica: str, reason: str) -> bool:
            found = await status(bus, replica)
            return not found.get("ready", True) and str(found["reason"]).startswith(reason)

        await until(lambda: says("0", "no_base_model"))
        async with buffer_process(config, "1") as second:
            await until(lambda: says("1", "standby"))
            await seed(objects, run_name)
            await until(lambda: says("0", "no_trainer"))
            await Trainer(bus, objects, settings).train(until_depth=0)
            await until(lambda: says("0", "no_eligible_replica"))
            first.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(first.wait(), 60.0) == 0
            await until(lambda: says("1", "no_eligible_replica"))
            second.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(second.wait(), 60.0) == 0
        writers = [record for record in await records(bus) if isinstance(record, WriterRecord)]
    assert len(writers) == 2


METRICS = (
    "oldest_open_group_age_seconds", "oldest_complete_group_age_seconds", "oldest_batch_age_seconds", "pacing_band_groups",
    "pacing_room_groups", 'staleness_depths{statistic="mean"}', 'staleness_depths{statistic="p99"}',
    'staleness_depths{statistic="max"}', "staleness_token_mean_depths", 'over_stale{statistic="tokens"}', "samples_dropped",
    "external_groups_refused", "outcomes_late", "admission_blocked_ratio", "trainer_waiting_ratio", "mixed_version_ratio",
    "groups_open", "groups_complete", "external_groups_offered", "groups_to_requeue", "resampled_groups", "requeues_refused",
)  # fmt: skip
"""What dashboards are built on; drops and refusals have no reasons yet, `length_bias` comes with the first batch."""


async def shown(http: httpx.AsyncClient, port: int, name: str) -> bool:
    return f"\n{name}" in (await http.get(f"http://127.0.0.1:{port}/metrics")).text


async def test_a_standby_is_alive_and_not_ready_and_takes_over_from_a_killed_one_when_its_lease_has_run_out(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    config = write_toml(tmp_path / "run.toml", settings)
    async with connected(settings) as (bus, objects), httpx.AsyncClient() as http:
        await seed(objects, run_name)

        async def probes(replica: str) -> tuple[int, int, str]:
            port = (await status(bus, replica))["port"]
            healthy = await http.get(f"http://127.0.0.1:{port}/healthz")
            ready = await http.get(f"http://127.0.0.1:{port}/readyz")
            return healthy.status_code, ready.status_code, ready.text

        async def says(replica: str, reason: str) -> bool:
            return str((await status(bus, replica)).get("reason", "")).startswith(reason)

        async with buffer_process(config) as first:
            await until(lambda: says("0", "no_trainer"))
            async with buffer_process(config, "1"):
                await until(lambda: says("1", "standby"))
                alive, ready, why = await probes("1")
                assert (alive, ready) == (200, 503)
                assert "standby: buffer is held by buffer.0" in why
                held = await bus.kv(LEASES).get("buffer")
                first.kill()
                await first.wait()
                last = await bus.kv(LEASES).get("buffer")
                await until(lambda: says("1", "no_trainer"), seconds=4 * LEASE_TTL_SECONDS)
                assert (await probes("1"))[0] == 200
                port = (await status(bus, "1"))["port"]
                await until(lambda: shown(http, port, "towline_buffer_trainer_waiting_ratio"))
                page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        writers = [record for record in await records(bus) if isinstance(record, WriterRecord)]
    for name in METRICS:
        assert f"\ntowline_buffer_{name}" in page or f"\n# TYPE towline_buffer_{name}_total counter" in page, name
    assert held is not None
    renewed = msgspec.json.decode(last or held)["at"]
    assert len(writers) == 2
    # Not while the killed one's lease stands (what it renewed last is its to the end), and not a lease later.
    assert LEASE_TTL_SECONDS - 1 <= writers[1].at - renewed <= 2 * LEASE_TTL_SECONDS


async def test_a_fault_in_the_prompts_is_one_line_and_exit_code_2(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, prompts={"source": "live.buffer.harness:nothing"})
    config = write_toml(tmp_path / "run.toml", settings)
    async with connected(settings) as (_, objects):
        await seed(objects, run_name)
        async with buffer_process(config) as process:
            assert process.stderr is not None
            said = (await asyncio.wait_for(process.stderr.read(), 20)).decode()
            assert await process.wait() == 2
    assert said.strip() == (
        "import: prompts.source = 'live.buffer.harness:nothing': module 'live.buffer.harness' has no 'nothing'"
    )
