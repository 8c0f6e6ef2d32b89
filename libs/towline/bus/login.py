"""As whom a connection to the bus is made, and whether it's encrypted. Secrets are read from their files each time anew."""

from __future__ import annotations

import ssl
from typing import Any

import nats.errors
import nkeys
from nats.aio.client import Client

from towline.config import BusSettings
from towline.config_servers import SEED, read_secret
from towline.errors import UsageError


class EncryptedClient(Client):  # type: ignore[misc]  # nats-py has no types
    """nats-py's, which goes on in the clear, secrets and all, where a server, or whoever stands before it, says it has no TLS."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise nats.errors.Error("nats: the server offers no TLS")
        await super()._process_info(info, initial_connection)


def new_client(settings: BusSettings) -> Client:
    return EncryptedClient() if settings.encrypted else Client()


def login(settings: BusSettings) -> dict[str, Any]:
    """nats-py's keywords for the user and for TLS. `UsageError` where a file isn't there, or holds something else."""
    keywords = {
        "user": settings.user,
        "password": settings.secret if settings.user else "",
        "token": settings.token.get_secret_value(),
        "user_credentials": settings.credentials,
        "nkeys_seed_str": settings.seed,
        "tls": _tls(settings) if settings.encrypted else None,
    }
    _check_credentials(settings)
    if keywords["nkeys_seed_str"]:
        _check_seed(settings)
    return {name: value for name, value in keywords.items() if value}


def _check_credentials(settings: BusSettings) -> None:
    """nats-py would call a missing file an unexpected end of the connection, and trip over one that holds something else."""
    path = settings.credentials
    setting = "bus.keys_folder" if path != settings.credentials_file else "bus.credentials_file"
    text = read_secret(path, setting)
    if text and not all(f"BEGIN {part}" in text for part in ("NATS USER JWT", "USER NKEY SEED")):
        raise UsageError(
            f"{setting} = {path!r} holds no user's token with its seed; `towline access nats --jwt` writes such files",
            code="secret_file",
        )


def _check_seed(settings: BusSettings) -> None:
    try:
        nkeys.from_seed(bytearray(settings.seed.encode())).wipe()
    except (nkeys.NkeysError, ValueError):
        where = "keys_folder" if settings.by_folder else "nkey_seed_file"
        path = f"{settings.keys_folder}/{settings.acts_as}{SEED}" if settings.by_folder else settings.nkey_seed_file
        raise UsageError(
            f"bus.{where} = {path!r} holds no nkey's seed; `towline access nats` writes one where the file isn't there",
            code="secret_file",
        ) from None


def judge(address: str, reason: str) -> None:
    """`UsageError` where a connection failed for what no further try mends."""
    lowered = reason.lower()
    if "authorization" in lowered:
        raise UsageError(
            f"the bus at {address} refuses the user ({reason}); check bus.keys_folder, nkey_seed_file, user, password, token or "
            "credentials_file, and that the server has the same users",
            code="bus_authorization",
        )
    if "no tls" in lowered:
        raise UsageError(
            f"the bus at {address} offers no TLS, which bus.tls_ca or a tls:// URL demands; give the server a `tls` block",
            code="bus_tls",
        )
    if "certificate" in lowered:
        raise UsageError(
            f"the bus at {address}: {reason}; bus.tls_ca must hold who signed its certificate, bus.url a name that stands in it, "
            "and bus.tls_cert one of a client where the server wants that",
            code="bus_tls",
        )


def _tls(settings: BusSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca or None)
        if settings.tls_cert:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        files = ", ".join(filter(None, (settings.tls_ca, settings.tls_cert, settings.tls_key)))
        raise UsageError(f"bus.tls_ca, tls_cert, tls_key ({files}): {error.strerror or error}", code="bus_tls") from None
    return context
