"""The nats-server configuration that holds the users: accounts, nkeys with their permissions, limits, TLS.

It names public keys alone, so it's no secret. Each account is a world of its own: tenants in different ones share nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from towline.access.nats import Permissions, permissions


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant. `users`: role -> its public nkey. `max_file_bytes`: what its streams may reserve; None: no limit of its own."""

    name: str
    runs: Sequence[str]
    users: Mapping[str, str]
    max_file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths as the server sees them. `ca` is needed where clients must show certificates (`verify`)."""

    cert: str
    key: str
    ca: str = ""
    verify: bool = False
    seconds: float = field(default=5.0)
    """What the handshake may take."""


def users_config(accounts: Sequence[Account], tls: Tls | None = None) -> str:
    """A fragment to include in a server's configuration, or to stand in it: `accounts`, and `tls` if given."""
    lines = ["accounts {"]
    for account in accounts:
        limit = "enabled" if account.max_file_bytes is None else f"{{ max_file: {account.max_file_bytes} }}"
        lines += [f"  {json.dumps(account.name)} {{", f"    jetstream: {limit}", "    users: ["]
        for role, key in account.users.items():
            lines += [f"      # {role}", f"      {_user(key, permissions(role, account.runs))}"]
        lines += ["    ]", "  }"]
    lines.append("}")
    return "\n".join(lines) + "\n" + (tls_config(tls) if tls else "")


def tls_config(tls: Tls) -> str:
    """The server's `tls` block."""
    lines = ["tls {", f"  cert_file: {json.dumps(tls.cert)}", f"  key_file: {json.dumps(tls.key)}"]
    if tls.ca:
        lines.append(f"  ca_file: {json.dumps(tls.ca)}")
    return "\n".join([*lines, f"  verify: {json.dumps(tls.verify)}", f"  timeout: {tls.seconds:g}", "}"]) + "\n"


def authorization_config(runs: Sequence[str], users: Mapping[str, str]) -> str:
    """The same users without an account of their own: for a server that had none, whose streams are in the default account."""
    lines = [f"  {_user(key, permissions(role, runs))}  # {role}" for role, key in users.items()]
    return "\n".join(["authorization { users: [", *lines, "] }"]) + "\n"


def plain(granted: Permissions) -> dict[str, dict[str, list[str]]]:
    """As nats-server's configuration and user JWTs' makers have it."""
    return {
        "publish": {"allow": list(granted.publish), "deny": list(granted.publish_deny)},
        "subscribe": {"allow": list(granted.subscribe), "deny": list(granted.subscribe_deny)},
    }


def _user(key: str, granted: Permissions) -> str:
    return json.dumps({"nkey": key, "permissions": plain(granted)})
