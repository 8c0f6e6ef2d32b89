"""`towline access nats|s3|show`: a user and keys for each role, and what it may; `towline init` prepares a bus and a store."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from towline.cli.paths import to_write
from towline.errors import UsageError

app = typer.Typer(help="Users and keys for a run's services, each with its own permissions.", no_args_is_help=True)


def run_names(names: list[str] | None) -> list[str] | None:
    """For `typer.Option(callback=…)`: names that a run can have."""
    from towline.bus.topology import Topology

    for name in names or []:
        Topology(name)
    return names


Runs = Annotated[list[str], typer.Option("--run", callback=run_names, help="A run's name; several times for several runs.")]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", callback=to_write, help="The folder to write into; its secrets are owner-only.")
]
Anew = Annotated[bool, typer.Option("--rotate", help="New secrets for all roles; else those in DIR stay.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
FLAVOURS = ("seaweedfs", "minio", "aws")


@app.command()
def nats(
    runs: Runs,
    out: Out,
    account: Annotated[str, typer.Option(help="The account's name: a tenant's. Accounts share nothing.")] = "towline",
    sites: Annotated[
        list[str] | None, typer.Option("--site", help="A site of the runs, as in bus.sites; several times for several.")
    ] = None,
    near: Annotated[
        list[str] | None, typer.Option("--near", help="Another cluster whose server is a leaf without JetStream; several times.")
    ] = None,
    max_file_bytes: Annotated[int | None, typer.Option(min=1, help="What the account's streams may reserve.")] = None,
    walls: Annotated[
        bool, typer.Option("--walls/--one-account", help="An account for each role, so that a stolen key stays in its role.")
    ] = True,
    jwt: Annotated[
        bool, typer.Option("--jwt", help="Users by signed tokens, accounts by an operator's: DIR/ACCOUNT/ROLE.creds.")
    ] = False,
    tls_cert: Annotated[str, typer.Option(help="The server's certificate, a path on the server: adds a tls block.")] = "",
    tls_key: Annotated[str, typer.Option(help="Its key.")] = "",
    tls_ca: Annotated[str, typer.Option(help="Whose client certificates are asked for: with it, clients must show one.")] = "",
    rotate: Anew = False,
) -> None:
    """Write DIR/nats.conf, a fragment of a nats-server's configuration with the users, and DIR/ROLE.nk, each role's nkey seed.

    The fragment holds public keys alone. Services find their seed by bus.keys_folder = "DIR", or bus.nkey_seed_file. With --jwt
    each call adds a tenant, or renews one, and leaves the others as they are.
    """
    from towline.access.credentials import bus_users
    from towline.access.nats_config import Account, Tls, tls_config, users_config
    from towline.access.roles import ROLES
    from towline.access.sites import checked_sites, leaf_users
    from towline.access.tenants import checked_account, write_tenant
    from towline.config import BusSettings

    runs = list(dict.fromkeys(runs))  # nats-server takes no import twice
    checked_account(account)
    if bool(tls_cert) != bool(tls_key) or (tls_ca and not tls_cert):
        raise UsageError("--tls-cert and --tls-key go together, --tls-ca with both", code="access_tls")
    tls = Tls(tls_cert, tls_key, tls_ca, verify=bool(tls_ca)) if tls_cert else None
    names = checked_sites(sites or [])
    if jwt:
        if names or near:
            raise UsageError("--site and --near go without --jwt: their servers come by an nkey", code="access_sites")
        config = write_tenant(out, account, runs, max_file_bytes=max_file_bytes, anew=rotate, walls=walls)
        (out / "nats.conf").write_text(config + (tls_config(tls) if tls else ""))
        print(f"{out / 'nats.conf'}: the operator and all accounts in {out}; the server's configuration includes it")
        print(f"{out / account}/ROLE.creds: its users' tokens for {', '.join(runs)}; bus.keys_folder = {str(out / account)!r}")
        return
    users = bus_users(out, ROLES, anew=rotate)
    leaves = [leaf_users(out, which, anew=rotate) for which in (names, checked_sites(near or [], "--near"))]
    accounts = [Account(account, runs, users, max_file_bytes, walls, *leaves)]
    (out / "nats.conf").write_text(users_config(accounts, tls))
    print(f"{out / 'nats.conf'}: account {account} with {len(users)} users for {', '.join(runs)}; include it in the server's")
    if near:
        (out / "near.conf").write_text(users_config(accounts, tls, home_domain=BusSettings().home_domain))
        print(f"{out / 'near.conf'}: the same for near clusters' servers, which have no JetStream of their own")
    print(f"{out}/ROLE.nk: their seeds; bus.keys_folder = {str(out)!r}")
    for name in [*names, *(near or [])]:
        print(f"{out}/leaf-{name}.nk: the seed of {name}'s server, for nothing else (`towline access sites`)")


@app.command()
def s3(
    runs: Runs,
    out: Out,
    flavour: Annotated[str, typer.Option(help="seaweedfs, minio or aws.")] = "seaweedfs",
    bucket: Annotated[str, typer.Option(help="The bucket of store.url.")] = "towline",
    prefix: Annotated[str, typer.Option(help="What store.url has after the bucket.")] = "",
    rotate: Anew = False,
) -> None:
    """Write each role's policy, and the keys that go with it.

    seaweedfs: DIR/s3.json for `weed s3 -config` (it holds the keys). minio: DIR/ROLE.policy.json and DIR/apply.sh, which gives
    them to the server by mc. aws: DIR/ROLE.policy.json alone: the keys are Amazon's. Else DIR/ROLE.s3-access and .s3-secret.
    """
    from towline.access import s3 as policies
    from towline.access.credentials import private_folder, store_keys
    from towline.access.roles import ROLES
    from towline.runtime.files import write_private

    if flavour not in FLAVOURS:
        raise UsageError(f"--flavour {flavour}: use {', '.join(FLAVOURS)}", code="access_flavour")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", bucket):
        raise UsageError(
            f"--bucket {bucket!r}: use 3 to 63 of a-z, 0-9, '.' and '-', as in store.url = s3://BUCKET/PREFIX", code="bucket"
        )
    prefix = prefix.strip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise UsageError(f"--prefix {prefix!r}: give what stands after the bucket in store.url", code="prefix")
    chosen: Any = flavour
    documents = {role: policies.policy(role, bucket, runs, prefix=prefix, flavour=chosen) for role in ROLES}
    if flavour == "seaweedfs":
        pairs = store_keys(out, [*ROLES, policies.ADMIN], anew=rotate)
        write_private(out / "s3.json", policies.seaweedfs_config(documents, pairs))
        print(f"{out / 's3.json'}: {len(documents)} identities and the administrator's, for `weed s3 -config`; it holds the keys")
    else:
        private_folder(out)
        for role, document in documents.items():
            (out / f"{role}.policy.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{out}/ROLE.policy.json: {len(documents)} policies")
    if flavour == "minio":
        store_keys(out, ROLES, anew=rotate)
        (out / "apply.sh").write_text(policies.minio_script(list(ROLES)))
        print(f"{out / 'apply.sh'}: `sh apply.sh ALIAS` gives users and policies to the server of mc's ALIAS")
    if flavour != "aws":
        print(f"{out}/ROLE.s3-access, .s3-secret: their keys; store.keys_folder = {str(out)!r}")


@app.command()
def show(
    role: Annotated[str | None, typer.Argument(help="A role; without one: all of them, and what they do.")] = None,
    runs: Annotated[
        list[str] | None, typer.Option("--run", callback=run_names, help="The run in whose names it's shown.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a role may do on the bus and in the store."""
    from towline.access import s3 as policies
    from towline.access.nats import permissions
    from towline.access.nats_config import plain
    from towline.access.roles import ROLES, checked

    if role is None:
        print(json.dumps(ROLES) if as_json else "\n".join(f"{name:15} {what}" for name, what in ROLES.items()))
        return
    granted, rules = permissions(checked(role), runs or ["run"]), policies.RULES[role]
    if as_json:
        store = {"put": rules.put, "delete": rules.delete, "never_delete": rules.never_delete}
        print(json.dumps({"role": role, "nats": plain(granted), "store": store}))
        return
    print(f"{role}: {ROLES[role]}")
    for title, subjects in (
        ("publish", granted.publish), ("but not", granted.publish_deny), ("subscribe", granted.subscribe),
        ("store: put", rules.put), ("store: delete", rules.delete), ("but not", rules.never_delete),
    ):  # fmt: skip
        for subject in subjects:
            print(f"  {title:14} {subject}")
            title = ""


def init(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_TOML", help="The run's TOML file, or a run's name.")],
    as_json: Json = False,
) -> None:
    """Make a run's bucket, streams and consumers, as role init, and see that the store keeps its word. It can be repeated."""
    from towline.access.init import initialise
    from towline.local.access import own_bus_is_down
    from towline.local.run_directory import find_run

    directory, settings = find_run(target)
    if own_bus_is_down(directory, settings):
        raise UsageError(f"run {settings.run.name} isn't up; `towline up` makes what it starts", code="run_down")
    if not settings.bus.url or not settings.store.url:
        raise UsageError(
            "init is for a bus and a store of one's own: set bus.url and store.url (`towline up` makes what it starts)",
            code="init",
        )
    told = asyncio.run(initialise(settings))
    print(json.dumps({"run": settings.run.name, "made": told}) if as_json else "\n".join(told))
