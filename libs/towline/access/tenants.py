"""A folder of tenants by signed tokens, as `towline access nats --jwt` keeps it.

FOLDER/nats.conf                the server's configuration: no secret
       operator.seed            signs accounts: needed to add a tenant, by nobody else
       ACCOUNT/account.seed     signs the tenant's users: needed to add a run
       ACCOUNT/account.jwt      who the tenant is
       ACCOUNT/ROLE.creds       a role's token and seed: all that a service needs
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from towline.access import jwt
from towline.access.nats import permissions
from towline.access.roles import ROLES
from towline.errors import UsageError
from towline.runtime.files import write_private

SYSTEM = "system"
_CONTROL_LINE_BYTES = 128 << 10
"""A client sends its token in one line; the server's default of 4 KiB is too little for some roles' permissions."""
MOST_TOKEN_BYTES = _CONTROL_LINE_BYTES - (4 << 10)
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def write_tenant(
    folder: Path, account: str, runs: Sequence[str], *, max_file_bytes: int | None = None, anew: bool = False
) -> str:
    """Make or renew a tenant: its users have these runs, and with `anew` new seeds. The others stay as they are.

    The server's configuration, with all tenants of the folder. `UsageError` where the runs are too many for a token.
    """
    if not _NAME.fullmatch(account) or account == SYSTEM:
        raise UsageError(f"account {account!r}: use 1 to 32 of a-z, 0-9 and '-', not {SYSTEM!r}", code="account_name")
    operator = _signer(folder / "operator.seed", jwt.new_operator)
    system = _account(folder / SYSTEM, operator, SYSTEM, None, jetstream=False)
    own = _account(folder / account, operator, account, max_file_bytes)
    for role in ROLES:
        path = folder / account / f"{role}.creds"
        user = jwt.new_user() if anew or not path.is_file() else jwt.Signer(_seed_in(path))
        token = jwt.user_token(own, user.public, role, permissions(role, runs))
        if len(token) > MOST_TOKEN_BYTES:
            raise UsageError(
                f"{len(runs)} runs are too many for one token ({len(token)} bytes): make a second account", code="account_runs"
            )
        write_private(path, jwt.credentials_text(token, user.seed))
    accounts = {}
    for path in sorted(folder.glob("*/account.jwt")):
        accounts[jwt.Signer((path.parent / "account.seed").read_text().strip()).public] = path.read_text().strip()
    resolver = jwt.resolver_config(jwt.operator_token(operator, system.public), accounts, system.public)
    return f"max_control_line: {_CONTROL_LINE_BYTES}\n{resolver}"


def _account(folder: Path, operator: jwt.Signer, name: str, limit: int | None, *, jetstream: bool = True) -> jwt.Signer:
    signer = _signer(folder / "account.seed", jwt.new_account)
    token = jwt.account_token(operator, signer.public, name, max_file_bytes=limit, jetstream=jetstream)
    (folder / "account.jwt").write_text(token + "\n")
    return signer


def _signer(path: Path, make: Callable[[], jwt.Signer]) -> jwt.Signer:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.is_file():
        write_private(path, make().seed)
    return jwt.Signer(path.read_text().strip())


def _seed_in(path: Path) -> str:
    found = re.search(r"BEGIN USER NKEY SEED-----\s*(\S+)", path.read_text())
    if found is None:
        raise UsageError(f"{path}: no seed in it; remove it, and a new one is made", code="nkey")
    return found[1]
