"""`towline access sites`: what a run's nats-servers need so that sites with a bus of their own join home's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from towline.cli.access import run_names
from towline.cli.paths import to_write
from towline.errors import UsageError


def sites(
    runs: Annotated[list[str], typer.Option("--run", callback=run_names, help="A run's name; several times for several runs.")],
    names: Annotated[list[str], typer.Option("--site", help="A site's name, as in bus.sites; several times for several.")],
    home_url: Annotated[str, typer.Option("--home-url", help="Home's door as the sites reach it: tls://host:7422.")],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", callback=to_write, help="The folder to write into; its secrets are owner-only."),
    ],
    account: Annotated[str, typer.Option(help="The account's name, as in `towline access nats`.")] = "towline",
    listen: Annotated[str, typer.Option(help="Where home's door listens.")] = "127.0.0.1:7422",
    ca: Annotated[str, typer.Option(help="Who signed home's certificate: a PEM file, a path on the site's server.")] = "",
    tls_cert: Annotated[str, typer.Option(help="The door's certificate, a path on home's server: sites must encrypt.")] = "",
    tls_key: Annotated[str, typer.Option(help="Its key.")] = "",
) -> None:
    """Write DIR/home.conf and DIR/SITE.conf, fragments of the servers' configurations.

    Each server includes its own beside the accounts of `towline access nats --site SITE`, which makes each site's seed,
    leaf-SITE.nk; a site's server has its seed in TOWLINE_LEAF_SEED. A site is shut out by that command without its name.
    """
    from towline.access.nats_config import Tls
    from towline.access.sites import SEED_VARIABLE, checked_door, checked_sites, home_config, site_config

    if bool(tls_cert) != bool(tls_key):
        raise UsageError("--tls-cert and --tls-key go together", code="access_tls")
    runs, listed = list(dict.fromkeys(runs)), checked_sites(names)
    checked_door(home_url, listen)
    out.mkdir(parents=True, exist_ok=True)
    (out / "home.conf").write_text(home_config(listen, Tls(tls_cert, tls_key) if tls_cert else None))
    print(f"{out / 'home.conf'}: home's door; its server also has `jetstream {{ domain: home }}`")
    for name in listed:
        (out / f"{name}.conf").write_text(site_config(home_url, runs, account, ca=ca))
        print(f"{out / name}.conf: the connection of site {name}; its server also has `jetstream {{ domain: {name} }}`,")
        print(f"  and the text of leaf-{name}.nk (`towline access nats --site {name}`) in {SEED_VARIABLE}")
