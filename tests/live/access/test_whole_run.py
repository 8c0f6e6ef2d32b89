"""A whole run whose services each have their own user, over TLS, on servers that know the roles alone. Its audit is clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme

from support.servers import running
from towline.access.credentials import bus_users, public_key, seed_path
from towline.access.nats_config import Account, Tls, users_config
from towline.access.roles import ROLES, SERVICES
from towline.local.servers import NatsServer, S3Server

DEMO = Path(__file__).parents[3] / "examples" / "demo.toml"
RUN = "guarded"
SMALL = {
    "model.arguments": "{ layers = 1, hidden = 32, warm_up_steps = 5 }", "buffer.groups_per_batch": 4, "rollout.slots": 32,
    "eval.prompts": 8, "eval.every": 2, "trainer.checkpoint_every": 2, "publisher.anchor_every": 2, "gateway.replicas": 1,
    "run.steps": 4,
}  # fmt: skip
LIMIT_SECONDS = 240


@pytest.mark.slow
@pytest.mark.parametrize("walls", [False, True], ids=["one-account", "walls"])
def test_a_run_over_tls_with_a_user_and_keys_for_each_role_ends_with_a_clean_audit(tmp_path: Path, walls: bool) -> None:
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    ca.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    keys = tmp_path / "keys"
    tls = Tls(str(tmp_path / "server.pem"), str(tmp_path / "server.pem"))
    config = users_config([Account("tenant", [RUN], bus_users(keys, ROLES), walls=walls)], tls)
    for bus in running(NatsServer(tmp_path / "nats", authorization=config)):
        for store in running(S3Server(tmp_path / "s3", runs=[RUN])):
            settings = SMALL | {
                "bus.url": f"tls://localhost:{bus.state['ports']['client']}", "bus.tls_ca": str(tmp_path / "ca.pem"),
                "bus.keys_folder": str(keys), "store.url": "s3://towline", "store.endpoint": store.endpoint,
                "store.keys_folder": str(tmp_path / "s3" / "keys"), "run.directory": str(tmp_path / "runs"),
            }  # fmt: skip
            given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
            command = [sys.executable, "-m", "towline.cli.main", "up", str(DEMO), "--run", RUN, *given, "--json"]
            clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=tmp_path, env=clean)
            assert done.returncode == 0, done.stdout + done.stderr
            answer = json.loads(done.stdout)
            assert answer["audit"]["clean"]
            assert answer["summary"]["steps"] == 4
            seen = httpx.get(
                f"http://127.0.0.1:{bus.state['ports']['monitor']}/connz?auth=true&state=any&limit=1024", trust_env=False
            ).json()["connections"]
    users = {role: public_key(seed_path(keys, role)) for role in ROLES}
    for service in SERVICES:
        mine = {entry["authorized_user"] for entry in seen if entry["name"].startswith(f"{RUN}.{service.replace('-', '_')}.")}
        assert mine == {users[service]}, service
    assert all(entry.get("tls_version") for entry in seen)
    logs = "".join(path.read_text() for path in (tmp_path / "runs" / RUN / "logs").iterdir())
    for refusal in ("bus_denied", "store_permission"):
        assert refusal not in logs
    assert "Permissions Violation" not in bus.log_tail(100_000)
    for role in ROLES:
        assert seed_path(keys, role).read_text() not in logs
