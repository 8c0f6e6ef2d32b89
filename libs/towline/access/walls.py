"""A tenant's accounts, one for each role around the one that has the streams, so that a stolen key stays within its role.

JetStream answers to whatever reply subject a request names and asks nobody whether the client may publish there: within one
account any key that may ask for anything can so purge and delete streams and write records (docs/design/090-access.md). Here a
role's account has no streams and imports, subject by subject, what the role may publish. A reply subject means something in the
asker's own account alone, and the role could publish there what it may publish anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from towline.access import roles
from towline.access.nats import Permissions, inbox, permissions
from towline.bus.topology import Topology

ACCOUNT_INFO = "$JS.API.INFO"
"""nats-server gives an account without streams the whole `$JS.API.>` of its own, which answers "JetStream not enabled" before
the imports do, unless it imports this one."""
_REPLIES = "_R_.>"
"""nats-server's own names for the reply subjects of another account's requests."""
ASKED_SECONDS, SERVE_SECONDS = 10.0, 600.0
"""How long JetStream's answer may be silent, and a replica's. A request that many messages may answer is remembered by the server
for so long after the last of them, and idle workers pull several times a second; readers' pulls have a heartbeat."""


@dataclass(frozen=True, slots=True)
class Export:
    """What the accounts `to` may import. `stream`: messages to hear; else requests. `seconds`: of requests that many messages
    answer, None of those that one does."""

    subject: str
    to: tuple[str, ...]
    stream: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Import:
    """`account`: whose export it is."""

    subject: str
    account: str
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Walled:
    """An account. `role` "": the one with the streams, which has no users."""

    name: str
    role: str
    permissions: Permissions | None
    exports: tuple[Export, ...]
    imports: tuple[Import, ...]


def account_of(tenant: str, role: str) -> str:
    """The name of the role's account."""
    return f"{tenant}-{roles.checked(role)}"


def walled(tenant: str, runs: Sequence[str], sites: Sequence[str] = ()) -> list[Walled]:
    """The tenant's accounts; the first, which has the streams, has the tenant's name."""
    granted = {role: walled_permissions(role, runs, sites) for role in roles.ROLES}
    serving = _serving(runs)
    requests: dict[str, list[str]] = {ACCOUNT_INFO: list(roles.ROLES)}
    for role, one in granted.items():
        for subject in one.publish:
            if subject not in (ACCOUNT_INFO, _REPLIES):
                requests.setdefault(subject, []).append(role)
    core = Walled(
        name=tenant,
        role="",
        permissions=None,
        exports=tuple(
            Export(subject, tuple(account_of(tenant, role) for role in who), seconds=_seconds(subject, serving))
            for subject, who in sorted(requests.items())
        ),
        # The one thing that isn't JetStream's: a request to a replica goes through here, so that it also reaches other sites'.
        imports=tuple(Import(subject, account_of(tenant, roles.WORKER)) for subject in serving),
    )
    return [core, *(_of_role(tenant, role, granted, requests, serving) for role in roles.ROLES)]


def _of_role(
    tenant: str, role: str, granted: dict[str, Permissions], requests: dict[str, list[str]], serving: Sequence[str]
) -> Walled:
    own = granted[role]
    exports: list[Export] = []
    # What one role says and another hears (hints) goes from account to account: nats-server doesn't hand on as a message to hear
    # what has come into an account as a request.
    for subject in (subject for subject in own.publish if subject not in serving):
        hearers = tuple(account_of(tenant, other) for other in _others(role) if subject in granted[other].subscribe)
        if hearers:
            exports.append(Export(subject, hearers, stream=True))
    if role == roles.WORKER:
        exports += [Export(subject, (tenant,), seconds=SERVE_SECONDS) for subject in serving]
    imports = [Import(subject, tenant) for subject in widest(subject for subject, who in requests.items() if role in who)]
    for subject in (subject for subject in own.subscribe if subject not in serving):
        tellers = [other for other in _others(role) if subject in granted[other].publish]
        imports += [Import(subject, account_of(tenant, other), stream=True) for other in tellers]
    return Walled(account_of(tenant, role), role, own, tuple(exports), tuple(imports))


def _others(role: str) -> list[str]:
    return [other for other in roles.ROLES if other != role]


def widest(subjects: Iterable[str]) -> list[str]:
    """Those that no other one covers: what two imports match is sent twice."""
    every = sorted(subjects)
    wide = [one for one in every if "*" in one or ">" in one]
    return [one for one in every if not any(other != one and _covers(other, one) for other in wide)]


def _covers(wide: str, narrow: str) -> bool:
    """Whether all subjects of the one pattern are of the other, too."""
    wanted, tokens = wide.split("."), narrow.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(tokens) > index
        if index >= len(tokens) or tokens[index] == ">" or token not in ("*", tokens[index]):
            return False
    return len(tokens) == len(wanted)


def walled_permissions(role: str, runs: Sequence[str], sites: Sequence[str] = ()) -> Permissions:
    """The role's permissions, but that who answers another account's requests does so by the server's name for the asker."""
    plain = permissions(role, runs, sites)
    answered = {subject for subject in plain.publish if subject.startswith("_INBOX.") and subject != f"{inbox(role)}.>"}
    if not answered:
        return plain
    return replace(plain, publish=tuple(sorted(set(plain.publish) - answered | {_REPLIES})))


def _serving(runs: Iterable[str]) -> tuple[str, ...]:
    names = [Topology(run).serve("*") for run in runs]
    return tuple(sorted(subject for name in names for subject in (name, f"{name}.cancel")))


def _seconds(subject: str, serving: Sequence[str]) -> float | None:
    if subject in serving:
        return SERVE_SECONDS
    return ASKED_SECONDS if ".CONSUMER.MSG.NEXT." in subject or ".DIRECT.GET." in subject else None
