"""`towline access sites`: what a run's nats-servers need so that sites with a bus of their own join home's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from towline.errors import UsageError


def sites(
    runs: Annotated[list[str], typer.Option("--run", help="A run's name; several times for several runs.")],
    names: Annotated[list[str], typer.Option("--site", help="A site's name, as in bus.sites; several times for several.")],
    home_url: Annotated[str, typer.Option("--home-url", help="Home's door as the sites reach it: tls://host:7422.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to write into; its secrets are owner-only.")],
    account: Annotated[str, typer.Option(help="The account's name, as in `towline access nats`.")] = "towline",
    listen: Annotated[str, typer.Option(help="Where home's door listens.")] = "127.0.0.1:7422",
    ca: Annotated[str, typer.Option(help="Who signed home's certificate: a PEM file, a path on the site's server.")] = "",
    tls_cert: Annotated[str, typer.Option(help="The door's certificate, a path on home's server: sites must encrypt.")] = "",
    tls_key: Annotated[str, typer.Option(help="Its key.")] = "",
    rotate: Annotated[bool, typer.Option("--rotate", help="A new secret; else the one in DIR stays.")] = False,
) -> None:
    """Write DIR/home.conf and DIR/SITE.conf, fragments of the servers' configurations, and DIR/leaf.nk, the sites' seed.

    Each server includes its own beside the accounts of `towline access nats`; a site's has the seed in TOWLINE_LEAF_SEED.
    """
    from towline.access.credentials import bus_users
    from towline.access.nats_config import Tls
    from towline.access.sites import SEED_VARIABLE, home_config, site_config
    from towline.config import BusSettings

    if bool(tls_cert) != bool(tls_key):
        raise UsageError("--tls-cert and --tls-key go together", code="access_tls")
    try:
        BusSettings(sites=tuple(names))
    except ValueError:
        raise UsageError(
            f"--site {' '.join(names)}: each another name of 1 to 32 of a-z, 0-9 and '-', none of them 'home'", code="site_name"
        ) from None
    key = bus_users(out, ["leaf"], anew=rotate)["leaf"]
    (out / "home.conf").write_text(home_config(listen, key, account, Tls(tls_cert, tls_key) if tls_cert else None))
    print(f"{out / 'home.conf'}: home's door; its server also has `jetstream {{ domain: home }}`")
    for name in names:
        (out / f"{name}.conf").write_text(site_config(home_url, runs, account, ca=ca))
        print(f"{out / name}.conf: the connection of site {name}; its server also has `jetstream {{ domain: {name} }}`,")
        print(f"  and the text of {out}/leaf.nk in {SEED_VARIABLE}")
