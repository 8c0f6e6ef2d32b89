"""Two sites in two network namespaces, 50 ms each way and 1% of the packets lost between them, cut for a minute.

Needs root and TUN; `make test-sites`. What was measured is printed, and stands in docs/design/092-several-clusters.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from live.sites.pair import ACCOUNT, SITE, anybody, free_port, listens, server, server_config, settings_of
from live.sites.whole import FAR, NEAR, SAMPLES, converged, delivered, look, start, under_way
from live.sites.whole import settings_of as run_settings
from live.worker.fleet import RealVersions
from support.servers import running
from support.taken import newest_taken
from support.waiting import until
from towline.access.init import prepare_bus
from towline.access.sites import SEED_VARIABLE, home_config, leaf_users, site_config
from towline.bus.client import Bus
from towline.bus.topology import ACKS, CONTROL, POLICY, REPLICAS, STATUS, TRAJECTORY
from towline.config import BusSettings, StoreSettings
from towline.contract.policy import decode_ack
from towline.local.servers import S3Server
from towline.local.toml import settings_toml
from towline.store.objects import open_store

DELAY_SECONDS, LOSS, CUT_SECONDS = 0.05, 0.01, 60.0
STEPS = 14
SLOTS = 4
"""Of each side's one worker."""
STALENESS = 9
"""So much is issued ahead that 8 slots have some 80 s of work at the cut: (1 + 9) * 8 samples of about 8 s each."""
_USABLE = os.geteuid() == 0 and os.path.exists("/dev/net/tun") and shutil.which("ip") is not None

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _USABLE, reason="needs root, /dev/net/tun and iproute2: the sites are network namespaces"),
]


@dataclass
class Line:
    """`here` and `there` are its ends; `beside` is the other side for who looks on."""

    process: asyncio.subprocess.Process
    namespace: str
    subnet: str
    beside: str

    @property
    def here(self) -> str:
        return f"{self.subnet}.1"

    @property
    def inside(self) -> list[str]:
        """Before a command line, to run it on the other side."""
        return ["ip", "netns", "exec", self.namespace]

    async def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        await self.process.stdin.drain()


@contextlib.asynccontextmanager
async def line() -> AsyncIterator[Line]:
    number, namespace = random.randrange(0, 250, 2), f"tw{random.randrange(10**6)}"
    subnet = f"10.213.{number}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__).with_name("line.py")), namespace, subnet, str(DELAY_SECONDS), str(LOSS),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert (await process.stdout.readline()).strip() == b"up"
        yield Line(process, namespace, subnet, f"10.213.{number + 1}.2")
    finally:
        process.stdin.close()
        counts = await process.stdout.read()
        await process.wait()
        print("line:", counts.decode().strip())


@contextlib.asynccontextmanager
async def relayed(host: str, target_port: int) -> AsyncIterator[int]:
    """A door on `host` to a server that listens on loopback alone; its port."""

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target_port)
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))

    door = await asyncio.start_server(serve, host, 0)
    try:
        yield door.sockets[0].getsockname()[1]
    finally:
        door.close()


@dataclass
class Two:
    line: Line
    home: BusSettings
    site: BusSettings
    """As a process on the other side comes to it."""
    seen: BusSettings
    """The same, as this process does, also while the line is cut."""


@contextlib.asynccontextmanager
async def two_servers(folder: Path, run: str) -> AsyncIterator[Two]:
    home_port, door, site_port = (free_port() for _ in range(3))
    users = anybody(leaf_users(folder / "keys", [SITE])[SITE])
    async with line() as between:
        home, site = folder / "home.conf", folder / "site.conf"
        leaf = home_config(f"{between.here}:{door}")
        home.write_text(server_config("home", f"127.0.0.1:{home_port}", folder / "home", users, leaf))
        leaf = site_config(f"nats-leaf://{between.here}:{door}", [run], ACCOUNT)
        site.write_text(server_config(SITE, f"0.0.0.0:{site_port}", folder / "site", users, leaf))
        seed = (folder / "keys" / f"leaf-{SITE}.nk").read_text().strip()
        common = BusSettings(sites=(SITE,), budget_bytes=128 << 20)
        async with server(home, home_port, {}), server(site, site_port, {SEED_VARIABLE: seed}, between.inside):
            await until(lambda: listens(site_port, between.beside))
            made = Two(
                between,
                common.model_copy(update={"url": f"nats://127.0.0.1:{home_port}"}),
                common.model_copy(update={"url": f"nats://127.0.0.1:{site_port}", "site": SITE}),
                common.model_copy(update={"url": f"nats://{between.beside}:{site_port}", "site": SITE}),
            )
            for bus in (made.home, made.seen):
                await prepare_bus(settings_of(run, bus))
            await _joined(made, run)
            yield made


async def _joined(made: Two, run: str) -> None:
    """Mirrors and sources that found nobody at first ask again after 10 s, then after 20 more, and so on."""
    buses = [await Bus.connect(bus, run=run, client_name="join", patience_seconds=15) for bus in (made.home, made.seen)]
    home, site = buses
    await home.publish(home.topology.policy("opened"), b"")

    async def both() -> bool:
        found = [(await site.stream_state(POLICY)).messages > 0]
        for bucket in (STATUS, REPLICAS):
            await site.kv(bucket).put("join", b"")  # entries expire
            found.append(await home.kv(bucket).get("join") is not None)
        return all(found)

    await until(both, 150.0)
    for bus in buses:
        await bus.close()


@contextlib.asynccontextmanager
async def mirror_process(config: Path, target: StoreSettings, inside: list[str]) -> AsyncIterator[None]:
    command = [str(Path(sys.executable).parent / "towline"), "store", "mirror", str(config), target.url, "--follow", "--json"]
    with config.with_suffix(".log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*inside, *command, stdout=log, stderr=log)
    try:
        yield
        assert process.returncode is None, config.with_suffix(".log").read_text()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@pytest.mark.parametrize("silent_seconds", [600.0, 15.0], ids=["waits", "issues_again"])
async def test_a_minute_without_the_line_costs_time_and_no_sample(tmp_path: Path, run_name: str, silent_seconds: float) -> None:
    far_store = StoreSettings(url=(tmp_path / "far-store").as_uri())
    with contextlib.contextmanager(running)(S3Server(tmp_path / "s3")) as s3:
        stored = s3.settings()
        store_port = int(stored.endpoint.rpartition(":")[2])
        async with two_servers(tmp_path, run_name) as two, relayed(two.line.here, store_port) as door:
            settings = run_settings(
                run_name, two.home, stored, tmp_path, steps=STEPS, site_silent_seconds=silent_seconds, max_staleness=STALENESS
            )
            rollout = settings.rollout.model_copy(
                update={
                    "arguments": settings.rollout.arguments | {"mean_tokens": 800.0}, "partial_every_tokens": 100, "slots": SLOTS
                }
            )  # fmt: skip
            sampling = settings.sampling.model_copy(update={"max_tokens": 1600})
            settings = settings.model_copy(update={"rollout": rollout, "sampling": sampling})
            reached = stored.model_copy(update={"endpoint": f"http://{two.line.here}:{door}", "timeout_seconds": 5.0})
            config = tmp_path / "mirror.toml"
            config.write_text(settings_toml(settings.model_copy(update={"store": reached})))
            home = await Bus.connect(two.home, run=run_name, client_name="home", patience_seconds=15)
            site = await Bus.connect(two.seen, run=run_name, client_name="look", patience_seconds=15)
            copy, begin = open_store(far_store), asyncio.Event()
            async with mirror_process(config, far_store, two.line.inside), under_way(settings, home, tmp_path, begin) as run:
                await start(run, NEAR, settings)
                far = settings.model_copy(update={"bus": two.site, "store": far_store})
                await start(run, FAR, far, two.line.inside)
                await until(lambda: _serves(site, 0), 120.0)
                await until(lambda: _alive(home), 60.0)
                begin.set()  # groups go to those who are there
                await run.until_depth(2)
                figures = await _cut(two, run.trainer, site)
                figures |= await _levels(home, site, run.trainer.log.lineage.latest)
                await run.until_depth(STEPS, 300.0)
                assert set((await run.ended()).values()) == {0}
                await converged(run, settings, copy)
            began, ended = figures.pop("began"), figures.pop("ended")
            seen = await look(home, site, (began, ended))
            figures |= {
                "far_made_while_cut": seen.between, "of_these_trained": seen.between_trained, "stale_drops": seen.stale,
                "admitted": dict(seen.admitted), "trained": dict(seen.trained), "moved": seen.moved, "twice": len(seen.twice),
                "tokens": seen.tokens, "tokens_twice": seen.tokens_twice, "at_site": seen.at_site,
            }  # fmt: skip
            print(json.dumps(figures))
            await home.close()
            await site.close()
        assert seen.trained.total() == STEPS * SAMPLES
        assert set(seen.trained) == {NEAR, FAR}
        assert seen.between > SLOTS, "on the far side no sample was begun while the line was cut"
        assert seen.between_trained > 0, "nothing of what was made while the line was cut was fresh enough to be trained"
        assert figures["depth_at_the_end"] > figures["depth_at_the_cut"], "home stood still"
        if silent_seconds > CUT_SECONDS:
            assert (seen.moved, seen.twice) == (0, {})
        else:
            assert seen.moved > 0


async def _cut(two: Two, trainer: RealVersions, site: Bus) -> dict[str, Any]:
    await until(lambda: _half_a_group(site), 60.0)
    await two.line.say("cut")
    before, depth, last, began, at = await delivered(site), trainer.depth, 0.0, time.monotonic(), time.time()
    count, thirds = before, [0, 0, 0]
    while (passed := time.monotonic() - began) < CUT_SECONDS:
        await asyncio.sleep(0.2)
        if (now := await delivered(site)) > count:
            thirds[min(int(3 * passed / CUT_SECONDS), 2)] += now - count
            count, last = now, passed
    figures: dict[str, Any] = {
        "depth_at_the_cut": depth, "depth_at_the_end": trainer.depth, "far_delivered_while_cut": count - before,
        "in_each_third": thirds, "far_delivered_last_seconds": round(last, 1), "began": at, "ended": time.time(),
    }  # fmt: skip
    await two.line.say("heal")
    return figures


async def _levels(home: Bus, site: Bus, version: int) -> dict[str, float]:
    """How long after the line is back each of them is level, in seconds."""
    healed, made = time.monotonic(), await delivered(site)

    async def after(reached: Callable[[], Awaitable[bool]]) -> float:
        await until(reached, 120.0)
        return round(time.monotonic() - healed, 1)

    control, trajectories, serves = await asyncio.gather(
        after(lambda: _level(home, site)), after(lambda: _taken(home, made)), after(lambda: _serves(site, version))
    )
    return {"control_level_seconds": control, "trajectories_level_seconds": trajectories, "version_level_seconds": serves}


async def _taken(home: Bus, count: int) -> bool:
    """Home has as many of the site's messages."""
    origins, _ = await newest_taken(home.jetstream, home.topology.stream(TRAJECTORY), [SITE], start=1)
    return origins.get(SITE, 0) >= count


async def _half_a_group(site: Bus) -> bool:
    return await delivered(site) % 2 == 1


async def _alive(home: Bus) -> bool:
    return {NEAR, FAR} <= set(await home.kv(REPLICAS).items())


async def _level(home: Bus, site: Bus) -> bool:
    return (await site.stream_state(CONTROL)).last_sequence >= (await home.stream_state(CONTROL)).last_sequence - 2


async def _serves(site: Bus, version: int) -> bool:
    value = await site.kv(ACKS).get(FAR)
    return value is not None and decode_ack(value).version >= version
