"""The supervisor and the guard on real processes: small programs stand for the services, the nats-server is a real one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from towline.errors import UnavailableError, UsageError
from towline.local.cleanup import UP, end_leftovers, end_run, start_guard
from towline.local.daemon import free_ports
from towline.local.ports import KeptPorts
from towline.local.run_directory import Processes, RunDirectory
from towline.local.services import ServiceSpec
from towline.local.supervisor import Supervisor
from towline.report.figures import Status

SLEEP = "import time; time.sleep(60)"
IGNORE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    yield directory
    for process in Processes(directory).alive().values():
        process.kill()
    for server in (directory.nats(), directory.s3()):
        server.kill()


def spec(directory: RunDirectory, service: str, code: str, replica: str = "0") -> ServiceSpec:
    """A service that is `code`; its command line names the settings file, as the real ones' does."""
    command = (sys.executable, "-c", code, "--config", str(directory.settings_path))
    return ServiceSpec(service, replica, command, dict(os.environ))


async def until(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 — another process changes it
            await asyncio.sleep(0.02)


async def test_a_killed_service_is_started_again_and_a_finished_one_isnt(directory):
    events = []
    specs = [spec(directory, "trainer", SLEEP), spec(directory, "reward", "pass")]
    supervisor = Supervisor(directory, specs, [], events.append)
    supervisor.run_ended.set()
    supervisor.start()
    await until(lambda: "trainer" in Processes(directory).alive())
    first = Processes(directory).alive()["trainer"]
    first.kill()
    await until(lambda: Processes(directory).alive().get("trainer", first) != first)
    assert supervisor.restarts == {"trainer": 1}
    assert "trainer was killed by SIGKILL; starting it again" in events[0]
    await supervisor.stop_services()
    assert Processes(directory).alive() == {}


async def test_a_killed_one_is_started_at_once_however_often_unless_it_dies_young(directory, monkeypatch):
    monkeypatch.setattr("towline.local.supervisor.CALM_SECONDS", 0.5)
    events = []
    supervisor = Supervisor(directory, [spec(directory, "trainer", SLEEP)], [], events.append)
    supervisor.start()

    async def killed(lived_seconds: float) -> str:
        before = len(events)
        await until(lambda: "trainer" in Processes(directory).alive())
        await asyncio.sleep(lived_seconds)
        Processes(directory).alive()["trainer"].kill()
        await until(lambda: len(events) > before and "trainer" in Processes(directory).alive())
        return events[before]

    for _ in range(3):
        assert "was killed by SIGKILL; starting it again (log:" in await killed(0.6)
    assert supervisor.restarts == {"trainer": 3}
    # Its own start fails, time after time: then it's left in peace for longer and longer.
    monkeypatch.setattr("towline.local.supervisor.CALM_SECONDS", 60.0)
    assert ["in 0.25 s" in await killed(0.0), "in 0.5 s" in await killed(0.0)] == [True, True]
    monkeypatch.setattr("towline.local.supervisor.CALM_SECONDS", 0.5)
    assert "starting it again (log:" in await killed(0.6)
    await supervisor.stop_services()


async def test_a_gateway_that_comes_back_has_the_port_that_it_took_first(directory):
    code = "import os, time; print('asked for', os.environ.get('TOWLINE_GATEWAY__PORT', 'any'), flush=True); time.sleep(60)"
    ports = KeptPorts("127.0.0.1", ("api_port",))
    supervisor = Supervisor(
        directory, [dataclasses.replace(spec(directory, "gateway", code), ports=ports)], [], lambda line: None
    )
    log = directory.log_path("gateway")

    async def restarted(times: int) -> str:
        await until(lambda: log.is_file() and log.read_text().count("asked for") == times)
        line = log.read_text().splitlines()[-1]
        Processes(directory).alive()["gateway"].kill()
        return line

    [port] = free_ports(1)
    supervisor.start()
    await until(lambda: "gateway" in Processes(directory).alive())
    supervisor.learn_ports([Status("gateway", "0", 1, 0, True, "", 0.0, {"api_port": port})])
    assert await restarted(1) == "asked for any"
    assert await restarted(2) == f"asked for {port}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert await restarted(3) in (f"asked for {port}", "asked for any")  # it was started before the port was taken, or after
        assert await restarted(4) == "asked for any"
    await supervisor.stop_services()


async def test_when_all_are_done_the_run_is_done(directory):
    supervisor = Supervisor(directory, [spec(directory, "reward", "pass"), spec(directory, "buffer", SLEEP)], [], print)
    supervisor.start()
    supervisor.run_ended.set()
    await asyncio.wait_for(supervisor.wait_done(), 60.0)
    assert supervisor.restarts.total() == 0
    await supervisor.stop_services()


async def test_one_that_somebody_else_stopped_before_the_end_is_started_again(directory, monkeypatch):
    monkeypatch.setattr("towline.local.supervisor.END_GRACE_SECONDS", 0.1)
    supervisor = Supervisor(directory, [spec(directory, "reward", "pass")], [], lambda _: None)
    supervisor.start()
    await until(lambda: supervisor.restarts["reward"] == 1)
    supervisor.run_ended.set()
    await asyncio.wait_for(supervisor.wait_done(), 60.0)
    await supervisor.stop_services()


async def test_a_wrong_configuration_ends_the_run_with_the_services_own_words(directory):
    code = "import sys; print('noise'); print('model_missing: no such folder', file=sys.stderr); sys.exit(2)"
    supervisor = Supervisor(directory, [spec(directory, "trainer", code), spec(directory, "buffer", SLEEP)], [], print)
    supervisor.start()
    with pytest.raises(UsageError, match="trainer refused its configuration: model_missing: no such folder"):
        await asyncio.wait_for(supervisor.wait_done(), 60.0)
    await supervisor.stop_services()
    assert Processes(directory).alive() == {}


async def test_one_that_keeps_dying_is_given_up(directory, monkeypatch):
    monkeypatch.setattr("towline.local.supervisor.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("towline.local.supervisor.LONGEST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr("towline.local.supervisor.MOST_FAILURES", 3)
    supervisor = Supervisor(directory, [spec(directory, "reward", "import sys; sys.exit('engine: broken')")], [], lambda _: None)
    supervisor.start()
    with pytest.raises(UnavailableError, match="reward ended 3 times: engine: broken"):
        await asyncio.wait_for(supervisor.wait_done(), 60.0)
    await supervisor.stop_services()


async def test_one_that_keeps_leaving_before_the_run_is_over_is_given_up_as_well(directory, monkeypatch):
    monkeypatch.setattr("towline.local.supervisor.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("towline.local.supervisor.LONGEST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr("towline.local.supervisor.END_GRACE_SECONDS", 0.05)
    monkeypatch.setattr("towline.local.supervisor.MOST_FAILURES", 3)
    supervisor = Supervisor(directory, [spec(directory, "reward", "print('nothing to do')")], [], lambda _: None)
    supervisor.start()
    with pytest.raises(UnavailableError, match="reward ended 3 times: nothing to do"):
        await asyncio.wait_for(supervisor.wait_done(), 60.0)
    await supervisor.stop_services()


async def test_fenced_ones_come_back_for_ever(directory, monkeypatch):
    monkeypatch.setattr("towline.local.supervisor.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("towline.local.supervisor.LONGEST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr("towline.local.supervisor.MOST_FAILURES", 2)
    supervisor = Supervisor(directory, [spec(directory, "buffer", "import sys; sys.exit(75)")], [], lambda _: None)
    supervisor.start()
    await until(lambda: supervisor.restarts["buffer"] >= 4)
    assert supervisor.failure is None
    await supervisor.stop_services()


async def test_everything_stops_in_order_and_the_deaf_are_killed(directory, monkeypatch):
    monkeypatch.setattr("towline.local.supervisor.STAGE_SECONDS", 0.3)
    monkeypatch.setattr("towline.local.supervisor.SERVICES_SECONDS", 1.5)
    log = directory.path / "ends"
    code = (
        "import signal, sys, time\n"
        f"def end(*_): open({str(log)!r}, 'a').write(sys.argv[-1] + '\\n'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('on', flush=True); time.sleep(60)"
    )
    specs = []
    for name in ("buffer", "rollout_worker", "reward", "publisher"):
        made = spec(directory, name, code)
        specs.append(ServiceSpec(name, "0", (*made.command, name), made.environment))
    specs.append(spec(directory, "trainer", IGNORE))
    supervisor = Supervisor(directory, specs, [], print)
    supervisor.start()
    await until(lambda: all(directory.log_path(s.process).is_file() and directory.log_path(s.process).read_text() for s in specs))
    started = time.monotonic()
    await supervisor.stop_services()
    assert time.monotonic() - started < 3.0
    assert log.read_text().split() == ["rollout_worker", "reward", "publisher", "buffer"]
    assert Processes(directory).alive() == {}


async def test_a_killed_server_comes_back_on_its_port(directory):
    server = directory.nats()
    await asyncio.to_thread(server.start)
    port, pid = server.url, server.pid
    supervisor = Supervisor(directory, [spec(directory, "buffer", SLEEP)], [server], lambda _: None)
    supervisor.start()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: server.pid not in (None, pid))
    await until(lambda: supervisor.restarts["nats-server"] == 1)
    assert server.url == port
    await supervisor.stop_services()
    await supervisor.stop_servers()
    assert server.pid is None


def start_detached(directory: RunDirectory, name: str, code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, "-m", f"towline.{name}", "--config", str(directory.settings_path)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def test_the_guard_ends_what_a_killed_up_left(directory):
    """SIGKILL closes the pipe, and that is all the guard needs. One service isn't even on record yet."""
    recorded, unrecorded = start_detached(directory, "buffer", SLEEP), start_detached(directory, "trainer", SLEEP)
    Processes(directory).record("buffer", recorded.pid)
    server = directory.nats()
    server.start()
    guard = start_guard(directory)
    guard.stdin.close()
    guard.wait(15)
    assert recorded.wait(5) == -signal.SIGTERM
    assert unrecorded.wait(5) == -signal.SIGTERM
    assert directory.nats().pid is None
    assert "ended" in directory.log_path("cleanup").read_text()


def test_the_guard_leaves_alone_what_ended_cleanly(directory):
    service = start_detached(directory, "buffer", SLEEP)
    Processes(directory).record("buffer", service.pid)
    guard = start_guard(directory)
    guard.communicate(b"clean", 10)
    assert service.poll() is None
    assert end_leftovers(directory) == ["buffer"]
    assert service.wait(5) == -signal.SIGTERM


def test_down_asks_up_first_and_ends_the_rest(directory):
    up, service = start_detached(directory, "none", SLEEP), start_detached(directory, "reward", SLEEP)
    Processes(directory).record(UP, up.pid)
    Processes(directory).record("reward", service.pid)
    assert end_run(directory) == [UP, "reward"]
    assert up.wait(5) == -signal.SIGTERM
    assert service.wait(5) == -signal.SIGTERM
    assert end_run(directory) == []


def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(directory):
    other = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        processes = Processes(directory)
        processes.record("trainer", other.pid)
        text = directory.processes_path.read_text()
        created = psutil.Process(other.pid).create_time()
        directory.processes_path.write_text(text.replace(str(created), str(created - 100)))
        assert processes.alive() == {}
        assert end_run(directory) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_processes_are_told_apart_by_run(tmp_path):
    mine, theirs = (RunDirectory(tmp_path / name) for name in ("mine", "theirs"))
    for directory in (mine, theirs):
        directory.path.mkdir()
    service = start_detached(theirs, "buffer", SLEEP)
    try:
        assert end_leftovers(mine) == []
        assert service.poll() is None
    finally:
        assert end_leftovers(theirs) == ["buffer-" + str(service.pid)]
    assert service.wait(5) == -signal.SIGTERM
