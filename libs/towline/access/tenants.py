"""A folder of tenants by signed tokens, as `towline access nats --jwt` keeps it.

FOLDER/nats.conf                the server's configuration: no secret
       operator.seed            signs accounts: needed to add a tenant, by nobody else
       operator.jwt             who the operator is; it stays, since a server that runs takes no other one
       ACCOUNT/account.seed     signs the tenant's users: needed to add a run
       ACCOUNT/account.jwt      who the tenant is
       ACCOUNT/ROLE.creds       a role's token and seed: all that a service needs
       ACCOUNT/ROLE/account.*   with walls, the same two for the role's own account, whose seed then signs its user
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nkeys

from towline.access import jwt
from towline.access.nats import permissions
from towline.access.roles import ROLES
from towline.access.walls import walled, walled_permissions, widest
from towline.errors import UsageError
from towline.runtime.files import write_private

SYSTEM = "system"
_SEED, _TOKEN = "account.seed", "account.jwt"
_CONTROL_LINE_BYTES = 128 << 10
"""A client sends its token in one line; the server's default of 4 KiB is too little for some roles' permissions."""
MOST_TOKEN_BYTES = _CONTROL_LINE_BYTES - (4 << 10)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def checked_account(name: str) -> str:
    if not _NAME.fullmatch(name) or name == SYSTEM:
        raise UsageError(f"account {name!r}: use 1 to 32 of a-z, 0-9 and '-', not {SYSTEM!r}", code="account_name")
    return name


def write_tenant(
    folder: Path,
    account: str,
    runs: Sequence[str],
    *,
    max_file_bytes: int | None = None,
    anew: bool = False,
    walls: bool = False,
) -> str:
    """Make or renew a tenant: its users have these runs, and with `anew` new seeds. The others stay as they are.

    The server's configuration, with all tenants of the folder: with `walls` (walls.py) it changes with the runs, else only with
    the list of tenants. `UsageError` where the runs are too many for a token.
    """
    checked_account(account)
    operator = _signer(folder / "operator.seed", jwt.new_operator)
    system = _account(folder / SYSTEM, operator, SYSTEM, jetstream=False)
    if walls:
        signers = _walled(folder / account, operator, account, runs, max_file_bytes)
    else:
        signers = dict.fromkeys(ROLES, _account(folder / account, operator, account, max_file_bytes=max_file_bytes))
        for role in ROLES:
            (folder / account / role / _TOKEN).unlink(missing_ok=True)
    for role in ROLES:
        _write_user(folder / account / f"{role}.creds", signers[role], role, runs, anew=anew, walls=walls)
    accounts = {}
    for path in sorted([*folder.glob(f"*/{_TOKEN}"), *folder.glob(f"*/*/{_TOKEN}")]):
        accounts[jwt.Signer((path.parent / _SEED).read_text().strip()).public] = path.read_text().strip()
    resolver = jwt.resolver_config(_operator_token(folder / "operator.jwt", operator, system), accounts, system.public)
    return f"max_control_line: {_CONTROL_LINE_BYTES}\n{resolver}"


def _walled(
    folder: Path, operator: jwt.Signer, tenant: str, runs: Sequence[str], max_file_bytes: int | None
) -> dict[str, jwt.Signer]:
    """The tenant's accounts; role -> who signs its user."""
    every = walled(tenant, runs)
    signers = {one.name: _signer(folder / one.role / _SEED, jwt.new_account) for one in every}
    for one in every:
        # Of exports that cover each other the wider one alone: a token with both isn't valid.
        subjects = widest(given.subject for given in one.exports)
        _account(
            folder / one.role, operator, one.name, max_file_bytes=None if one.role else max_file_bytes, jetstream=not one.role,
            exports=[jwt.export(given) for given in one.exports if given.subject in subjects],
            imports=[jwt.wanted(wish, signers[wish.account].public) for wish in one.imports],
        )  # fmt: skip
    return {one.role: signers[one.name] for one in every if one.role}


def _write_user(path: Path, signer: jwt.Signer, role: str, runs: Sequence[str], *, anew: bool, walls: bool) -> None:
    user = jwt.new_user() if anew or not path.is_file() else jwt.Signer(_seed_in(path))
    token = jwt.user_token(signer, user.public, role, walled_permissions(role, runs) if walls else permissions(role, runs))
    if len(token) > MOST_TOKEN_BYTES:
        raise UsageError(
            f"{len(runs)} runs are too many for one token ({len(token)} bytes): make a second account", code="account_runs"
        )
    write_private(path, jwt.credentials_text(token, user.seed))


def _account(
    folder: Path,
    operator: jwt.Signer,
    name: str,
    *,
    max_file_bytes: int | None = None,
    jetstream: bool = True,
    exports: Sequence[dict[str, Any]] = (),
    imports: Sequence[dict[str, Any]] = (),
) -> jwt.Signer:
    signer = _signer(folder / _SEED, jwt.new_account)
    token = jwt.account_token(
        operator, signer.public, name, max_file_bytes=max_file_bytes, jetstream=jetstream, exports=exports, imports=imports
    )
    (folder / _TOKEN).write_text(token + "\n")
    return signer


def _operator_token(path: Path, operator: jwt.Signer, system: jwt.Signer) -> str:
    """The one that stands there, as long as it's this operator's."""
    if path.is_file():
        token = path.read_text().strip()
        if jwt.same_claims(token, jwt.operator_token(operator, system.public)):
            return token
    token = jwt.operator_token(operator, system.public)
    path.write_text(token + "\n")
    return token


def _signer(path: Path, make: Callable[[], jwt.Signer]) -> jwt.Signer:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.is_file():
        write_private(path, make().seed)
    signer = jwt.Signer(path.read_text().strip())
    try:
        signer.public  # noqa: B018 — it takes the seed apart
    except (nkeys.NkeysError, ValueError):
        raise UsageError(
            f"{path}: no nkey seed in it; bring back the right one, or remove it: a new one is made, which no server knows yet",
            code="nkey",
        ) from None
    return signer


def _seed_in(path: Path) -> str:
    found = re.search(r"BEGIN USER NKEY SEED-----\s*(\S+)", path.read_text())
    if found is None:
        raise UsageError(f"{path}: no seed in it; remove it, and a new one is made", code="nkey")
    return found[1]
