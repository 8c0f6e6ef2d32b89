"""A service as a process: what it tells, how it stops, with which code it ends, and that it outlives its servers' deaths."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

import support.probe_service
from support.servers import running
from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import DEAD, STATUS
from towline.config import BusSettings, StoreSettings
from towline.local.servers import NatsServer, S3Server

PROGRAM = support.probe_service.__file__
SETTINGS = """
[run]
name = "{run}"
[bus]
url = "{bus}"
budget_bytes = 268435456
connect_timeout_seconds = 1.0
[store]
url = "{store.url}"
endpoint = "{store.endpoint}"
access_key = "{store.access_key}"
timeout_seconds = 5.0
[model]
source = "model"
[prompts]
source = "own:prompts"
[sampling]
max_tokens = 4
[reward]
function = "own:reward"
[service]
drain_seconds = 1.0
"""


class Probe:
    """A probe service in a process of its own; its streams go to files."""

    def __init__(self, folder: Path, config: Path, store: StoreSettings, replica: str, **environment: str) -> None:
        self.replica = replica
        self._out, self._err = folder / f"{replica}.out", folder / f"{replica}.err"
        secret = {"TOWLINE_STORE__SECRET_KEY": f'"{store.secret_key.get_secret_value()}"'}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, PROGRAM, "--config", str(config), "--replica", replica],
                stdout=out, stderr=err, env=os.environ | secret | environment, cwd=folder,
            )  # fmt: skip

    @property
    def out(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._out.read_text().splitlines()]

    @property
    def err(self) -> str:
        return self._err.read_text()

    async def status(self, bus: Bus) -> dict[str, object]:
        """This process's status entry, once there is one."""

        async def told() -> bool:
            assert self.process.poll() is None, self.err
            value = await bus.kv(STATUS).get(f"probe.{self.replica}")
            found.append(json.loads(value) if value else {})
            return bool(found[-1].get("pid") == self.process.pid and found[-1]["reason"] != "starting")

        found: list[dict[str, object]] = []
        await until(told)
        return found[-1]

    async def ended(self, seconds: float = 60.0) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)


class Probes:
    def __init__(self, folder: Path, config: Path, store: StoreSettings) -> None:
        self._folder, self._config, self._store = folder, config, store
        self.started: list[Probe] = []

    def start(self, replica: str = "0", **environment: str) -> Probe:
        self.started.append(Probe(self._folder, self._config, self._store, replica, **environment))
        return self.started[-1]


def _probes(folder: Path, run: str, bus_url: str, store: StoreSettings) -> Iterator[Probes]:
    config = folder / "run.toml"
    config.write_text(SETTINGS.format(run=run, bus=bus_url, store=store))
    probes = Probes(folder, config, store)
    try:
        yield probes
    finally:
        for probe in probes.started:
            with contextlib.suppress(ProcessLookupError):
                probe.process.kill()
            probe.process.wait()


@pytest.fixture
def probes(tmp_path: Path, run_name: str, nats_url: str, s3_settings: StoreSettings) -> Iterator[Probes]:
    yield from _probes(tmp_path, run_name, nats_url, s3_settings)


@pytest.fixture
async def bus(bus_settings: BusSettings, run_name: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    yield bus
    await bus.close()


async def test_a_service_tells_how_it_is_and_drains_on_sigterm(probes: Probes, bus: Bus) -> None:
    probe = probes.start()
    status = await probe.status(bus)
    assert (status["service"], status["replica"], status["ready"], status["reason"]) == ("probe", "0", True, "working")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{status['port']}", timeout=5.0) as client:
        assert (await client.get("/healthz")).json() == {"alive": True}
        assert (await client.get("/readyz")).json() == {"ready": True, "reason": "working"}
        metrics = (await client.get("/metrics")).text
    assert "towline_probe_ticks " in metrics
    assert 'towline_probe_dropped{key="stale"} 2.0' in metrics
    assert "process_resident_memory_bytes" in metrics
    probe.process.terminate()
    assert await probe.ended(5.0) == 0
    assert probe.err == ""
    events = {line["event"]: line for line in probe.out}
    assert list(events) == ["started", "draining", "drained", "stopped"]
    assert events["started"]["port"] == status["port"]
    assert events["drained"]["ticks"] == (await bus.stream_state(DEAD)).messages
    assert events["drained"]["password"] == "***"
    assert all(line["service"] == "probe" and line["replica"] == "0" and "at" in line for line in probe.out)


async def test_two_processes_never_share_a_name(probes: Probes, bus: Bus) -> None:
    """Both would write one status, and take one lease. Another name, another service's same name, and whoever comes after a
    kill are free."""
    first = probes.start("a")
    await first.status(bus)
    second = probes.start("a")
    assert await second.ended() == 2
    assert second.err == (
        f"replica_twice: probe a of run {bus.topology.run} runs on this machine already, as process {first.process.pid}: start "
        "this one under another name (--replica NAME), or stop that one\n"
    )
    await probes.start("b").status(bus)
    assert first.process.poll() is None
    first.process.kill()
    third = probes.start("a")
    await third.status(bus)
    assert third.err == ""


@pytest.mark.parametrize(
    ("behaviour", "code", "line"),
    [
        ("done", 0, ""),
        ("fenced", 75, "fenced: another probe took over\n"),
        ("crash", 1, "internal: ValueError: a bug\n"),
        ("group", 75, "fenced: succeeded\n"),
    ],
)
async def test_an_end_is_one_line_and_a_code(probes: Probes, behaviour: str, code: int, line: str) -> None:
    probe = probes.start(PROBE=behaviour)
    assert await probe.ended() == code
    assert probe.err == line
    crash = [entry for entry in probe.out if entry["event"] == "crashed"]
    assert bool(crash) == (behaviour == "crash")
    if crash:
        assert 'raise ValueError("a\\nbug")' in str(crash[0]["exception"])


async def test_what_does_not_drain_is_cut_short_also_in_a_thread(probes: Probes, bus: Bus) -> None:
    probe = probes.start(PROBE="deaf")
    await probe.status(bus)
    before = time.monotonic()
    probe.process.terminate()
    assert await probe.ended() == 0
    assert 0.9 < time.monotonic() - before < 4.0
    assert "drain_cut_short" in [line["event"] for line in probe.out]


async def test_a_second_signal_ends_it_at_once(probes: Probes, bus: Bus) -> None:
    probe = probes.start(PROBE="deaf")
    await probe.status(bus)
    probe.process.send_signal(signal.SIGINT)
    await until(lambda: "draining" in [line["event"] for line in probe.out])
    probe.process.send_signal(signal.SIGINT)
    assert await probe.ended(0.8) == 130
    assert probe.err == "stopped: second SIGINT\n"


async def test_faults_of_the_configuration_are_one_line_and_a_code(
    tmp_path: Path, run_name: str, nats_url: str, s3_settings: StoreSettings, probes: Probes
) -> None:
    config = tmp_path / "run.toml"
    good = config.read_text()
    cases = [
        ("max_tokens", "max_tokns", 2, "unknown key"),
        (nats_url, "nats://127.0.0.1:9", 1, "nats://127.0.0.1:9 can't be reached"),
        (s3_settings.access_key, "not-a-key", 2, "store"),
        ("drain_seconds = 1.0", 'host = "0.0.0.0"', 2, "needs service.token"),
    ]
    for number, (old, new, _, _) in enumerate(cases):
        config.write_text(good.replace(old, new))
        probe = probes.start(f"r{number}")
        await until(lambda probe=probe: probe.process.poll() is not None)  # type: ignore[misc]
    for (_, _, code, text), probe in zip(cases, probes.started, strict=True):
        assert probe.process.returncode == code, probe.err
        assert text in probe.err
        assert probe.err.count("\n") == 1
        assert s3_settings.secret_key.get_secret_value() not in probe.err


async def test_a_lease_goes_to_the_standby_when_its_holder_stops(probes: Probes, bus: Bus) -> None:
    first = probes.start("a", PROBE_LEASE="pen")
    assert (await first.status(bus))["ready"] is True
    second = probes.start("b", PROBE_LEASE="pen")
    status = await second.status(bus)
    assert (status["ready"], status["reason"]) == (False, "standby: pen is held by probe.a")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{status['port']}", timeout=5.0) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/readyz?standbyok=true")).status_code == 200
        first.process.terminate()
        assert await first.ended() == 0

        async def leads() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(leads, 5.0)
    second.process.kill()
    again = probes.start("b", PROBE_LEASE="pen")  # its former self's lease has not ended yet
    before = time.monotonic()
    assert (await again.status(bus))["ready"] is True
    assert time.monotonic() - before < 8.0
    waiting = probes.start("c", PROBE_LEASE="pen")
    assert (await waiting.status(bus))["ready"] is False
    waiting.process.terminate()
    assert await waiting.ended() == 0


async def test_a_service_outlives_sigkill_of_both_its_servers(tmp_path: Path, run_name: str) -> None:
    with contextlib.ExitStack() as stack:
        nats = stack.enter_context(contextlib.contextmanager(running)(NatsServer(tmp_path / "nats")))
        s3 = stack.enter_context(contextlib.contextmanager(running)(S3Server(tmp_path / "s3")))
        probes = stack.enter_context(contextlib.contextmanager(_probes)(tmp_path, run_name, nats.url, s3.settings()))
        bus = await Bus.connect(nats.settings(BusSettings(budget_bytes=256 << 20)), run=run_name, client_name="test")
        await bus.ensure()
        probe = probes.start(PROBE_LEASE="pen")
        await probe.status(bus)
        await asyncio.to_thread(nats.kill)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(nats.start)
        before = (await bus.stream_state(DEAD)).messages
        await until(lambda: _has_more(bus, before + 20))
        await asyncio.to_thread(s3.kill)
        await asyncio.sleep(0.5)
        stored = await _figure(probe, bus, "stored")
        await asyncio.to_thread(s3.start)

        async def stores_again() -> bool:
            return await _figure(probe, bus, "stored") > stored + 20

        await until(stores_again)
        status = await probe.status(bus)
        assert status["ready"] is True
        assert time.time() - float(str(status["at"])) < 5.0
        probe.process.terminate()
        assert await probe.ended() == 0, probe.err
        await bus.close()


async def _figure(probe: Probe, bus: Bus, name: str) -> int:
    figures = (await probe.status(bus))["figures"]
    assert isinstance(figures, dict)
    return int(figures[name])


async def _has_more(bus: Bus, count: int) -> bool:
    return (await bus.stream_state(DEAD)).messages > count
