"""As whom a connection to the bus is made, and whether it's encrypted. Secrets are read from their files each time anew."""

from __future__ import annotations

import ssl
from typing import Any

import nats.errors
from nats.aio.client import Client

from towline.config import BusSettings
from towline.config_servers import read_secret
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
    """nats-py's keywords for the user and for TLS. `UsageError` where a file isn't there."""
    keywords = {
        "user": settings.user,
        "password": settings.secret if settings.user else "",
        "token": settings.token.get_secret_value(),
        "user_credentials": settings.credentials,
        "nkeys_seed_str": settings.seed,
        "tls": _tls(settings) if settings.encrypted else None,
    }
    read_secret(settings.credentials_file, "bus.credentials_file")  # nats-py would call it an unexpected end of the connection
    return {name: value for name, value in keywords.items() if value}


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
