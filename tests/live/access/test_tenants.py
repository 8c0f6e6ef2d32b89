"""Tenants by signed tokens, against a real nats-server that knows nothing but the operator and the accounts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import running
from support.waiting import until
from towline.access import jwt
from towline.access.identity import bus_as
from towline.access.nats import permissions
from towline.access.roles import ROLES
from towline.access.tenants import write_tenant
from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.config import BusSettings
from towline.errors import MissingError, UnavailableError, UsageError
from towline.local.servers import NatsServer

RUN = "same"


@pytest.fixture(scope="module", params=[False, True], ids=["one-account", "walls"])
def tenants(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, Path]]:
    folder = tmp_path_factory.mktemp("tenants")
    write_tenant(folder / "keys", "alpha", [RUN], walls=request.param)
    config = write_tenant(folder / "keys", "beta", [RUN], max_file_bytes=128 << 20, walls=request.param)
    for server in running(NatsServer(folder / "nats", authorization=config)):
        yield server, folder / "keys"


async def connected(server: NatsServer, keys: Path, role: str, *, budget: int = 64 << 20) -> Bus:
    settings = server.settings(BusSettings(keys_folder=str(keys), role=role, budget_bytes=budget, connect_timeout_seconds=3))
    return await Bus.connect(settings, run=RUN, client_name=role)


async def test_two_tenants_see_nothing_of_each_other(tenants: tuple[NatsServer, Path]) -> None:
    server, keys = tenants
    init = await connected(server, keys / "alpha", "init")
    await init.ensure()
    buffer = await connected(server, keys / "alpha", "buffer")
    await buffer.publish(buffer.topology.control("batch"), b"alpha's")
    other = await connected(server, keys / "beta", "viewer")
    with pytest.raises(MissingError):
        await other.stream_state(CONTROL)
    init_too = await connected(server, keys / "beta", "init")
    await init_too.ensure()
    assert (await other.stream_state(CONTROL)).messages == 0
    assert (await buffer.stream_state(CONTROL)).messages == 1
    for bus in (init, buffer, other, init_too):
        await bus.close()


async def test_a_users_permissions_are_in_its_token(tenants: tuple[NatsServer, Path]) -> None:
    server, keys = tenants
    init = await connected(server, keys / "alpha", "init")
    await init.ensure()
    reward = await connected(server, keys / "alpha", "reward")
    await reward.publish(reward.topology.score(1, 0), b"scored")
    with pytest.raises(UsageError, match=r"refuses role reward to publish to towline\.same\.control\.batch"):
        await reward.publish(reward.topology.control("batch"), b"forged")
    await init.close()
    await reward.close()


async def test_a_tenants_limit_holds(tenants: tuple[NatsServer, Path]) -> None:
    server, keys = tenants
    init = await connected(server, keys / "beta", "init", budget=512 << 20)
    with pytest.raises(UsageError, match=r"bus\.budget_bytes|resource limits"):
        await init.ensure()
    await init.close()


async def test_a_run_is_added_without_touching_the_server(tmp_path: Path, run_name: str) -> None:
    config = write_tenant(tmp_path / "keys", "alpha", [RUN])
    for server in running(NatsServer(tmp_path / "nats", authorization=config)):
        assert write_tenant(tmp_path / "keys", "alpha", [RUN, run_name]).count("\n  A") == config.count("\n  A") == 2
        settings = server.settings(BusSettings(keys_folder=str(tmp_path / "keys" / "alpha"), role="init", budget_bytes=64 << 20))
        bus = await Bus.connect(settings, run=run_name, client_name="init")
        await bus.ensure()
        await bus.close()


async def test_with_walls_a_run_is_added_by_a_reload_and_who_is_connected_stays(tmp_path: Path, run_name: str) -> None:
    keys, users = tmp_path / "keys", tmp_path / "users.conf"
    users.write_text(write_tenant(keys, "alpha", [RUN], walls=True))
    for server in running(NatsServer(tmp_path / "nats", authorization='include "../users.conf"')):
        init = await connected(server, keys / "alpha", "init")
        await init.ensure()
        users.write_text(write_tenant(keys, "alpha", [RUN, run_name], walls=True))
        os.kill(server.pid or 0, signal.SIGHUP)
        settings = server.settings(BusSettings(keys_folder=str(keys / "alpha"), budget_bytes=64 << 20))

        async def makes(settings: BusSettings = settings) -> bool:
            bus = await Bus.connect(bus_as(settings, "init"), run=run_name, client_name="init", patience_seconds=0.5)
            try:
                await bus.ensure()
            except UnavailableError:  # the server hasn't read it yet
                return False
            finally:
                await bus.close()
            return True

        await until(makes)
        assert (await init.stream_state(CONTROL)).messages == 0
        await init.close()


async def test_from_one_account_to_walls_streams_stay_and_back(tmp_path: Path) -> None:
    keys, users = tmp_path / "keys", tmp_path / "users.conf"
    users.write_text(write_tenant(keys, "alpha", [RUN]))
    for server in running(NatsServer(tmp_path / "nats", authorization='include "../users.conf"')):
        init = await connected(server, keys / "alpha", "init")
        await init.ensure()
        buffer = await connected(server, keys / "alpha", "buffer")
        await buffer.publish(buffer.topology.control("batch"), b"kept")
        await init.close()
        await buffer.close()
        for walls in (True, False):
            users.write_text(write_tenant(keys, "alpha", [RUN], walls=walls))
            server.restart()
            viewer = await connected(server, keys / "alpha", "viewer")
            assert (await viewer.get(CONTROL, 1)).data == b"kept"
            await viewer.close()


async def test_a_token_of_another_authority_is_refused(tenants: tuple[NatsServer, Path], tmp_path: Path) -> None:
    server, _ = tenants
    write_tenant(tmp_path, "alpha", [RUN])  # another operator's, and another account
    with pytest.raises(UsageError, match="refuses the user"):
        await connected(server, tmp_path / "alpha", "buffer")
    user = jwt.new_user()  # and one that its account didn't sign
    forged = jwt.user_token(user, user.public, "buffer", permissions("buffer", [RUN]))
    (tmp_path / "buffer.creds").write_text(jwt.credentials_text(forged, user.seed))
    with pytest.raises(UsageError, match="refuses the user"):
        await connected(server, tmp_path, "buffer")


def test_what_a_server_needs_holds_no_seed_and_seeds_are_their_owners_alone(tmp_path: Path) -> None:
    config = write_tenant(tmp_path, "alpha", [RUN])
    seeds = [path for path in tmp_path.rglob("*") if path.suffix in (".seed", ".creds")]
    assert len(seeds) == 3 + len(ROLES)
    for path in seeds:
        assert path.stat().st_mode & 0o077 == 0
        assert not set(re.findall(r"\bS[OAU][A-Z2-7]{56}\b", path.read_text())) & set(
            re.findall(r"\bS[OAU][A-Z2-7]{56}\b", config)
        )
    before = (tmp_path / "alpha" / "buffer.creds").read_text()
    seed = re.findall(r"\bSU[A-Z2-7]{56}\b", before)
    write_tenant(tmp_path, "alpha", [RUN, "more"])
    assert re.findall(r"\bSU[A-Z2-7]{56}\b", (tmp_path / "alpha" / "buffer.creds").read_text()) == seed
    write_tenant(tmp_path, "alpha", [RUN], anew=True)
    assert re.findall(r"\bSU[A-Z2-7]{56}\b", (tmp_path / "alpha" / "buffer.creds").read_text()) != seed


def test_runs_that_one_token_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too many for one token"):
        write_tenant(tmp_path, "alpha", [f"run-{number}" for number in range(100)])


def test_a_tenants_name_is_checked(tmp_path: Path) -> None:
    for name in ("system", "../up", "", "A"):
        with pytest.raises(UsageError, match="use 1 to 32"):
            write_tenant(tmp_path, name, [RUN])
