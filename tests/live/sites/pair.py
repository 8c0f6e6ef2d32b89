"""Two sites on one machine: home's nats-server and another's, each a JetStream domain, one leaf connection between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.proxy import Proxy, proxied
from support.waiting import until
from towline.access.credentials import bus_users
from towline.access.identity import bus_as
from towline.access.init import prepare_bus
from towline.access.nats_config import Account, users_config
from towline.access.roles import ROLES
from towline.access.sites import SEED_VARIABLE, home_config, leaf_users, site_config
from towline.bus.client import Bus
from towline.config import BusSettings, ModelSettings, PromptSettings, RewardSettings, RunSettings, SamplingSettings, Settings

SITE = "b"
ACCOUNT = "towline"
BINARY = Path(sys.executable).parent / "nats-server"
HOST = "127.0.0.1"


def anybody(key: str) -> str:
    """Accounts in which anybody may do anything, and the site's server comes with the nkey `key`."""
    users = f"[ {{ user: any, password: any }}, {{ nkey: {key} }} ]"
    return f"accounts {{ {ACCOUNT} {{ jetstream: enabled, users: {users} }} }}\nno_auth_user: any\n"


@dataclass
class Pair:
    """`home` and `site`: how processes come to either bus. `line`: the way between them."""

    run: str
    home: BusSettings
    site: BusSettings
    line: Proxy
    folder: Path
    servers: dict[str, Server]

    def cut(self) -> None:
        self.line.refuse = True
        self.line.cut()

    def heal(self) -> None:
        self.line.refuse = False

    async def prepare(self) -> None:
        """As `towline init` on both sides."""
        for bus in (self.home, self.site):
            await prepare_bus(settings_of(self.run, bus))

    @asynccontextmanager
    async def buses(self, home_role: str = "", site_role: str = "") -> AsyncIterator[tuple[Bus, Bus]]:
        home = await Bus.connect(
            bus_as(self.home, home_role or "operator"), run=self.run, client_name="home", patience_seconds=15
        )
        try:
            site = await Bus.connect(
                bus_as(self.site, site_role or "operator"), run=self.run, client_name="b", patience_seconds=15
            )
            try:
                yield home, site
            finally:
                await site.close()
        finally:
            await home.close()


def settings_of(run: str, bus: BusSettings) -> Settings:
    return Settings(
        run=RunSettings(name=run),
        bus=bus,
        model=ModelSettings(source="none"),
        prompts=PromptSettings(source="a:b"),
        sampling=SamplingSettings(max_tokens=8),
        reward=RewardSettings(function="a:b"),
    )


def server_config(name: str, listen: str, store: Path, users: str, leaf: str) -> str:
    return (
        f'server_name: {name}\nlisten: "{listen}"\nmax_payload: 8MB\nmax_pending: 256MB\n'
        f'jetstream {{ store_dir: "{store}", domain: {name}, max_file_store: 4GB }}\n{users}{leaf}'
    )


@dataclass
class Server:
    """A nats-server. `prefix`: of its command line, to run it elsewhere."""

    config: Path
    port: int
    environment: dict[str, str]
    prefix: Sequence[str] = ()
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.config.with_suffix(".log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.prefix, BINARY, "-c", self.config, env={**os.environ, **self.environment}, stderr=log
            )
        if not self.prefix:
            await until(lambda: listens(self.port))

    async def stop(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        await self.process.wait()

    def reload(self) -> None:
        """Read the configuration again."""
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)


@asynccontextmanager
async def server(config: Path, port: int, environment: dict[str, str], prefix: Sequence[str] = ()) -> AsyncIterator[Server]:
    made = Server(config, port, environment, prefix)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def pair(folder: Path, run: str, *, roles: bool = True, walls: bool = True) -> AsyncIterator[Pair]:
    """`roles`: with a user for each; else anybody may do anything."""
    home_port, door, site_port = (free_port() for _ in range(3))
    keys = folder / "keys"
    sites = leaf_users(keys, [SITE])
    account = Account(ACCOUNT, [run], bus_users(keys, ROLES), walls=walls, sites=sites)
    users = users_config([account]) if roles else anybody(sites[SITE])
    async with proxied(f"nats://{HOST}:{door}") as line:
        home = folder / "home.conf"
        home.write_text(
            server_config(
                "home", f"{HOST}:{home_port}", folder / "home", users,
                home_config(f"{HOST}:{door}"),
            )
        )  # fmt: skip
        site = folder / "site.conf"
        site.write_text(
            server_config(
                SITE, f"{HOST}:{site_port}", folder / "site", users,
                site_config(line.url.replace("nats://", "nats-leaf://"), [run], ACCOUNT),
            )
        )  # fmt: skip
        seed = (keys / f"leaf-{SITE}.nk").read_text().strip()
        common = BusSettings(keys_folder=str(keys) if roles else "", sites=(SITE,), budget_bytes=128 << 20)
        async with server(home, home_port, {}) as first, server(site, site_port, {SEED_VARIABLE: seed}) as second:
            yield Pair(
                run,
                common.model_copy(update={"url": f"nats://{HOST}:{home_port}"}),
                common.model_copy(update={"url": f"nats://{HOST}:{site_port}", "site": SITE}),
                line,
                folder,
                {"home": first, SITE: second},
            )


def listens(port: int, host: str = HOST) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


_given: set[int] = set()


def free_port() -> int:
    """Never the same one twice: the kernel may give a port again that nobody listens on yet."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port
