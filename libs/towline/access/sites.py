"""What nats-servers need to be a run's sites: home's door for their connections, and each site's connection with its rules."""

from __future__ import annotations

import json
from collections.abc import Sequence

from towline.bus.sites import kept_apart, kept_in

SEED_VARIABLE = "TOWLINE_LEAF_SEED"
"""In the environment of a site's nats-server: the seed of the nkey with which its connection comes to home."""

_PINGS = 'ping_interval: "5s"\nping_max: 2\n'
"""A line that is cut without a word is noticed after 15 s, not after nats-server's 6 minutes, and dialled anew."""


def home_config(listen: str, key: str, account: str) -> str:
    """Home's part: where sites connect, and as whom. `key`: their public nkey; nats-server takes one for all of them."""
    user = f"{{ nkey: {key}, account: {json.dumps(account)} }}"
    return f"{_PINGS}leafnodes {{\n  listen: {json.dumps(listen)}\n  authorization {user}\n}}\n"


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
