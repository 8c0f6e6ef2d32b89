"""What nats-servers need to be a run's sites: home's door for their connections, and each site's connection with its rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from towline.access.credentials import bus_users
from towline.access.nats_config import Tls, tls_config
from towline.bus.sites import kept_apart, kept_in
from towline.config import BusSettings
from towline.errors import UsageError

SEED_VARIABLE = "TOWLINE_LEAF_SEED"
"""In the environment of a site's nats-server: the seed of the nkey with which its connection comes to home."""

_PINGS = 'ping_interval: "5s"\nping_max: 2\n'
"""A line that is cut without a word is noticed after 15 s, not after nats-server's 6 minutes, and dialled anew."""


def checked_sites(names: Sequence[str], option: str = "--site") -> list[str]:
    try:
        if any(name[:1].isdecimal() for name in names):
            raise ValueError("nats-server reads 9b as a number of bytes")
        return list(BusSettings(sites=tuple(names)).sites)
    except ValueError:
        raise UsageError(
            f"{option} {' '.join(names)}: each another name of 1 to 32 of a-z, 0-9 and '-', beginning with a letter, none "
            "of them 'home'",
            code="site_name",
        ) from None


def checked_door(home_url: str, listen: str) -> None:
    """`UsageError` for what nats-server would refuse, on another machine and later."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--listen {listen!r}: give ADDRESS:PORT, such as 0.0.0.0:7422", code="site_door")
    try:
        parts = urlsplit(home_url)
        fine = parts.scheme in ("tls", "nats", "nats-leaf", "ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(
            f"--home-url {home_url!r}: give tls://HOST:PORT, or nats-leaf://HOST:PORT in the clear", code="site_door"
        )


def leaf_users(folder: Path, sites: Iterable[str], *, anew: bool = False) -> dict[str, str]:
    """Site -> the public nkey with which its server comes to home's; FOLDER/leaf-SITE.nk holds the seed."""
    names = {f"leaf-{site}": site for site in sites}
    return {names[name]: key for name, key in bus_users(folder, names, anew=anew).items()}


def home_config(listen: str, tls: Tls | None = None) -> str:
    """Home's part: where sites connect. Who they are is said among the account's users: nats-server takes a single nkey in
    `leafnodes.authorization`, and without that block any user whose connection types allow it.

    `tls`: the door's own, since the clients' doesn't count for it; without it the door takes connections in the clear.
    """
    lines = [f"listen: {json.dumps(listen)}"]
    lines += ["no_advertise: true  # sites come by the one address that they were given, not by each server's own"]
    lines += tls_config(tls).splitlines() if tls else []
    return "\n".join([_PINGS.rstrip(), "leafnodes {", *(f"  {line}" for line in lines), "}"]) + "\n"


def site_config(url: str, runs: Sequence[str], account: str, *, ca: str = "") -> str:
    """A site's part: its one connection to home (`url`: tls:// or nats-leaf://host:port), and what doesn't cross it.

    The server also needs `jetstream { domain: SITE }`, home's `jetstream { domain: home }`, and both the same `accounts`.
    """
    apart = kept_apart(runs)
    lines = [
        _PINGS.rstrip(),
        "leafnodes {",
        "  remotes: [ {",
        f"    url: {json.dumps(url)}",
        f"    account: {json.dumps(account)}",
    ]
    lines += [f"    nkey: ${SEED_VARIABLE}"]
    lines += [f"    tls: {{ ca_file: {json.dumps(ca)} }}"] if ca else []
    for name, subjects in (("deny_imports", apart), ("deny_exports", [*apart, *kept_in(runs)])):
        lines += [f"    {name}: [", *(f"      {json.dumps(subject)}" for subject in subjects), "    ]"]
    return "\n".join([*lines, "  } ]", "}"]) + "\n"
