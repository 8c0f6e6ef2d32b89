"""Tenants by signed tokens: an operator signs accounts, an account signs its users, and their permissions travel in the token.

So a run or a tenant is added without touching the others' files, and the server's configuration changes only with the list of
accounts. Claims and signatures are NATS' own (version 2; ed25519 over the token's first two parts); nothing of them is secret.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nkeys

from towline.access.credentials import new_seed
from towline.access.nats import Permissions
from towline.access.walls import Export, Import

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_VERSION = 2
_NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class Signer:
    """A key that signs; `public` names it in what it signs, and in what is signed about it."""

    seed: str

    @property
    def public(self) -> str:
        return bytes(self._pair.public_key).decode()

    def sign(self, data: bytes) -> bytes:
        return bytes(self._pair.sign(data))

    @property
    def _pair(self) -> Any:
        return nkeys.from_seed(bytearray(self.seed.encode()))


def new_operator() -> Signer:
    return Signer(new_seed(nkeys.PREFIX_BYTE_OPERATOR))


def new_account() -> Signer:
    return Signer(new_seed(nkeys.PREFIX_BYTE_ACCOUNT))


def new_user() -> Signer:
    return Signer(new_seed(nkeys.PREFIX_BYTE_USER))


def operator_token(operator: Signer, system_account: str) -> str:
    """The operator says who it is itself. `system_account`: the public key of the account that the server's own events are in."""
    return _token(operator, operator.public, "towline", {"type": "operator", "system_account": system_account})


def account_token(
    operator: Signer,
    account: str,
    name: str,
    *,
    max_file_bytes: int | None = None,
    jetstream: bool = True,
    exports: Sequence[dict[str, Any]] = (),
    imports: Sequence[dict[str, Any]] = (),
) -> str:
    """An account, named by its public key. `max_file_bytes`: what its streams may reserve. `exports`, `imports`: see `export`
    and `wanted`; as they aren't tied to an importer, it's the operator who says by what it signs which account imports what."""
    disk = _NO_LIMIT if max_file_bytes is None else max_file_bytes
    everything = ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "streams", "consumer")
    limits: dict[str, Any] = dict.fromkeys(everything, _NO_LIMIT) | {"wildcards": True}
    limits |= {"mem_storage": _NO_LIMIT, "disk_storage": disk} if jetstream else {"mem_storage": 0, "disk_storage": 0}
    crossings = {name: list(found) for name, found in (("exports", exports), ("imports", imports)) if found}
    return _token(operator, account, name, {"type": "account", "limits": limits} | crossings)


def export(given: Export) -> dict[str, Any]:
    """As an account's token has it; for any account of the operator's."""
    many = {} if given.seconds is None else {"response_type": "Stream", "response_threshold": int(given.seconds * 1e9)}
    return {"name": given.subject, "subject": given.subject, "type": _kind(stream=given.stream), **many}


def wanted(wish: Import, account: str) -> dict[str, Any]:
    """An import from `account`, a public key."""
    return {"name": wish.subject, "subject": wish.subject, "account": account, "type": _kind(stream=wish.stream)}


def _kind(*, stream: bool) -> str:
    return "stream" if stream else "service"


def user_token(account: Signer, user: str, name: str, granted: Permissions) -> str:
    """A user of the account, named by its public key, with its permissions."""
    claims: dict[str, Any] = {"type": "user", "subs": _NO_LIMIT, "data": _NO_LIMIT, "payload": _NO_LIMIT}
    claims |= {
        "pub": {"allow": list(granted.publish), "deny": list(granted.publish_deny)},
        "sub": {"allow": list(granted.subscribe), "deny": list(granted.subscribe_deny)},
    }
    return _token(account, user, name, claims)


def same_claims(one: str, other: str) -> bool:
    """Whether two tokens say the same, but for when they were signed."""

    def claims(token: str) -> dict[str, Any]:
        part = token.split(".")[1]
        body: dict[str, Any] = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return {name: value for name, value in body.items() if name not in ("iat", "jti")}

    return claims(one) == claims(other)


def credentials_text(token: str, seed: str) -> str:
    """A .creds file, as every NATS client reads it. It holds the seed."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def resolver_config(operator: str, accounts: Mapping[str, str], system_account: str) -> str:
    """The server's side: whom it believes, and the accounts that there are (public key -> token), in memory."""
    lines = [f"operator: {operator}", f"system_account: {system_account}", "resolver: MEMORY", "resolver_preload: {"]
    return "\n".join([*lines, *(f"  {key}: {token}" for key, token in accounts.items()), "}"]) + "\n"


def _token(issuer: Signer, subject: str, name: str, claims: dict[str, Any]) -> str:
    body: dict[str, Any] = {
        "iat": int(time.time()), "iss": issuer.public, "name": name, "sub": subject, "nats": claims | {"version": _VERSION},
    }  # fmt: skip
    # The id is a digest of all the rest, so that two tokens differ where anything in them does.
    body["jti"] = base64.b32encode(hashlib.new("sha512_256", _json(body)).digest()).decode().rstrip("=")
    text = f"{_part(_json(_HEADER))}.{_part(_json(body))}"
    return f"{text}.{_part(issuer.sign(text.encode()))}"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
