"""The bus over TLS: who isn't known to the CA is refused on both sides, and no secret is sent in the clear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from support.servers import running
from towline.access.credentials import bus_users
from towline.access.nats_config import Account, Tls, users_config
from towline.access.roles import ROLES
from towline.bus.client import Bus
from towline.bus.topology import OUTCOME
from towline.config import BusSettings
from towline.errors import UnavailableError, UsageError
from towline.local.servers import NatsServer

RUN = "one"


class Field(NamedTuple):
    server: NatsServer
    keys: Path
    ca: Path
    client_cert: Path
    client_key: Path

    def settings(self, role: str, **others: str) -> BusSettings:
        port = self.server.url.rpartition(":")[2]
        given = {"url": f"tls://localhost:{port}", "keys_folder": str(self.keys), "role": role, "tls_ca": str(self.ca)}
        client = {"tls_cert": str(self.client_cert), "tls_key": str(self.client_key)}
        return BusSettings.model_validate({"budget_bytes": 64 << 20, "connect_timeout_seconds": 3} | given | client | others)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    ca.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    client = ca.issue_cert("client@towline")
    client.private_key_pem.write_to_path(folder / "client.key")
    client.cert_chain_pems[0].write_to_path(folder / "client.pem")
    tls = Tls(str(folder / "server.pem"), str(folder / "server.pem"), str(folder / "ca.pem"), verify=True)
    users = bus_users(folder / "keys", ROLES)
    config = users_config([Account("towline", [RUN], users, max_file_bytes=1 << 30)], tls)
    for server in running(NatsServer(folder / "nats", authorization=config)):
        yield Field(server, folder / "keys", folder / "ca.pem", folder / "client.pem", folder / "client.key")


async def test_roles_work_over_tls_with_certificates_on_both_sides(field: Field) -> None:
    init = await Bus.connect(field.settings("init"), run=RUN, client_name="init")
    await init.ensure()
    await init.close()
    reward = await Bus.connect(field.settings("reward"), run=RUN, client_name="reward")
    sequence = await reward.publish(reward.topology.score(1, 0), b"scored")
    assert (await reward.get(OUTCOME, sequence)).data == b"scored"
    with pytest.raises(UsageError, match="refuses role reward"):
        await reward.publish(reward.topology.control("batch"), b"forged")
    await reward.close()


async def test_a_server_of_another_authority_is_refused(field: Field, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(other)
    with pytest.raises(UsageError, match=r"certificate.*bus\.tls_ca"):
        await Bus.connect(field.settings("reward", tls_ca=str(other)), run=RUN, client_name="x")


async def test_a_server_under_another_name_is_refused(field: Field) -> None:
    url = field.settings("reward").url.replace("localhost", "127.0.0.1")
    with pytest.raises(UsageError, match="certificate"):
        await Bus.connect(field.settings("reward", url=url), run=RUN, client_name="x")


async def test_a_client_without_a_certificate_is_refused(field: Field) -> None:
    with pytest.raises((UsageError, UnavailableError)):
        await Bus.connect(field.settings("reward", tls_cert="", tls_key=""), run=RUN, client_name="x")


async def test_a_server_without_tls_gets_no_secret_where_tls_is_demanded(nats_server: NatsServer) -> None:
    """The one who answers in the clear may be somebody else: the password mustn't be sent."""
    port = nats_server.url.rpartition(":")[2]
    settings = BusSettings.model_validate(
        {"url": f"tls://localhost:{port}", "user": "a", "password": "secret-one", "connect_timeout_seconds": 2}
    )
    with pytest.raises(UsageError, match="offers no TLS"):
        await Bus.connect(settings, run=RUN, client_name="x")


async def test_a_ca_that_is_not_there_is_one_clear_line(field: Field) -> None:
    with pytest.raises(UsageError, match=r"bus\.tls_ca.*nowhere\.pem.*No such file"):
        await Bus.connect(field.settings("reward", tls_ca="/nowhere.pem"), run=RUN, client_name="x")
