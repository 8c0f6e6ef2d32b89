"""The nats-server configuration that holds the users: accounts, nkeys with their permissions, limits, TLS.

It names public keys alone, so it's no secret. Each account is a world of its own: tenants in different ones share nothing. A
tenant is one account, or with walls one for its streams and one for each role (walls.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from towline.access.nats import Permissions, permissions
from towline.access.walls import Export, Import, Walled, walled
from towline.bus.sites import domain_api, kept_apart, kept_in

_TO_DOMAIN = {"$JS.API.": "", "$KV.": "$KV."}
"""What a leaf connection lets through under a domain's prefix alone -> what follows the prefix there."""


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant. `users`: role -> its public nkey. `max_file_bytes`: what its streams may reserve; None: no limit of its own.
    `walls`: an account for each role beside it; without them a stolen key of any role can end a run.
    `sites`: each one's name -> the public nkey with which its server comes to home's; `near`: the
    same of servers without JetStream, from which everything comes to home's."""

    name: str
    runs: Sequence[str]
    users: Mapping[str, str]
    max_file_bytes: int | None = None
    walls: bool = False
    sites: Mapping[str, str] = field(default_factory=dict)
    near: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths as the server sees them. `ca` is needed where clients must show certificates (`verify`)."""

    cert: str
    key: str
    ca: str = ""
    verify: bool = False
    seconds: float = field(default=5.0)
    """What the handshake may take."""


def users_config(accounts: Sequence[Account], tls: Tls | None = None, *, home_domain: str = "") -> str:
    """A fragment to include in a server's configuration, or to stand in it: `accounts`, and `tls` if given.

    `home_domain`: for servers without JetStream (a near site's): the domain of the JetStream to which requests for it go.
    """
    lines = ["accounts {"]
    for account in accounts:
        if account.walls:
            lines += _walled(account, home_domain)
            continue
        lines += [f"  {json.dumps(account.name)} {{", f"    {_jetstream(account, home_domain)}", "    users: ["]
        for role, key in account.users.items():
            granted = permissions(role, account.runs, tuple(account.sites))
            lines += [f"      # {role}", f"      {_user(key, _as_mapped(granted, home_domain) if home_domain else granted)}"]
        lines += [*_sites(account), "    ]", "  }"]
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


def _walled(account: Account, home_domain: str) -> list[str]:
    lines = []
    for one in walled(account.name, account.runs, tuple(account.sites)):
        lines.append(f"  {json.dumps(one.name)} {{")
        if not one.role:
            lines += [f"    {_jetstream(account, home_domain)}", "    users: [", *_sites(account), "    ]"]
        elif one.role in account.users and one.permissions is not None:
            lines.append(f"    users: [ {_user(account.users[one.role], one.permissions)} ]")
        lines += _crossings(one)
        lines.append("  }")
    return lines


def _crossings(one: Walled) -> list[str]:
    """What the account gives to others and has of them."""
    lines = ["    exports: [", *(f"      {json.dumps(_export(export))}" for export in one.exports), "    ]"]
    return [*lines, "    imports: [", *(f"      {json.dumps(_import(wanted))}" for wanted in one.imports), "    ]"]


def _export(export: Export) -> dict[str, Any]:
    many = {} if export.seconds is None else {"response_type": "stream", "response_threshold": f"{export.seconds:g}s"}
    return {"stream" if export.stream else "service": export.subject, "accounts": list(export.to), **many}


def _import(wanted: Import) -> dict[str, Any]:
    return {"stream" if wanted.stream else "service": {"account": wanted.account, "subject": wanted.subject}}


def _jetstream(account: Account, home_domain: str) -> str:
    """Of the account with the streams: it has them, or what they are reached by."""
    if home_domain:
        return f"mappings: {json.dumps({f'{begin}>': f'{_mapped(begin, home_domain)}>' for begin in _TO_DOMAIN})}"
    return "jetstream: enabled" if account.max_file_bytes is None else f"jetstream: {{ max_file: {account.max_file_bytes} }}"


def _as_mapped(granted: Permissions, home_domain: str) -> Permissions:
    """nats-server looks at a user's permissions after its account's mappings."""
    publish, deny = (tuple(_mapped(one, home_domain) for one in every) for every in (granted.publish, granted.publish_deny))
    return replace(granted, publish=publish, publish_deny=deny)


def _mapped(subject: str, home_domain: str) -> str:
    for begin, there in _TO_DOMAIN.items():
        if subject.startswith(begin):
            return f"{domain_api(home_domain)}.{there}{subject.removeprefix(begin)}"
    return subject


def _sites(account: Account) -> list[str]:
    """The users of other clusters' servers: each comes as a leaf alone, by a key of its own."""
    found = [(name, key, _site_rules(account.runs)) for name, key in account.sites.items()]
    found += [(name, key, {}) for name, key in account.near.items()]
    lines: list[str] = []
    for name, key, rules in found:
        user = {"nkey": key, "allowed_connection_types": ["LEAFNODE"], **({"permissions": rules} if rules else {})}
        lines += [f"      # the server of {name}", f"      {json.dumps(user)}"]
    return lines


def _site_rules(runs: Sequence[str]) -> dict[str, Any]:
    """A site's server: what its own configuration keeps off the connection, home doesn't take from it either; and no request
    that makes, changes, purges or deletes a stream."""
    apart = kept_apart(runs)
    changes = [f"$JS.*.API.STREAM.{verb}.>" for verb in ("CREATE", "UPDATE", "PURGE", "DELETE", "MSG.DELETE", "RESTORE")]
    return {"publish": {"deny": [*apart, *kept_in(runs), *changes]}, "subscribe": {"deny": apart}}


def _user(key: str, granted: Permissions) -> str:
    return json.dumps({"nkey": key, "permissions": plain(granted)})
