"""What travels about policy versions: hints on the bus, acks and the registry in KV. The LOG alone is the truth."""

from __future__ import annotations

from typing import Literal

import msgspec

from towline.contract.codec import SCHEMA, decode

ACK_HISTORY = 64
"""Acknowledged versions that an ack tells of, the newest."""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag="opened", tag_field="kind"):
    """The trainer appended `open` as entry `epoch`."""

    schema: int = SCHEMA
    epoch: int


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged", tag_field="kind"):
    """A version waits to be verified and committed; `folder`/manifest.json has the sha256 `manifest_digest`."""

    schema: int = SCHEMA
    epoch: int
    base: int
    write_id: str
    folder: str
    manifest_digest: str


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed", tag_field="kind"):
    """A hint: the LOG has entry `number`."""

    schema: int = SCHEMA
    number: int
    epoch: int
    write_id: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused", tag_field="kind"):
    """The publisher won't commit this staged version."""

    schema: int = SCHEMA
    epoch: int
    write_id: str
    reason: str


PolicyMessage = Opened | Staged | Committed | Refused
_policy: msgspec.msgpack.Decoder[PolicyMessage] = msgspec.msgpack.Decoder(PolicyMessage)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a replica has served. `published_at` is its LOG entry's time, `at` that of the ack."""

    version: int
    depth: int
    published_at: float
    at: float


class Ack(msgspec.Struct, frozen=True, kw_only=True):
    """A replica serves `version`, and how it knows."""

    schema: int = SCHEMA
    replica: str
    version: int
    files_digest: str
    """The model digest of the verified copy."""
    engine_digest: str | None
    """The model digest over the engine's live weights; None where the engine can't compute one."""
    probe_max_abs_diff: float | None
    """Largest |logprob - expected| on the entry's fixed tokens; None where the entry has no probe."""
    probe_tolerance: float | None
    prepare_seconds: float
    pause_seconds: float
    wire_bytes: int
    mode: Literal["initial", "drain", "in_place", "retract"]
    at: float
    history: tuple[Served, ...] = ()
    """The last versions that this process acknowledged, this one last."""
    failed: dict[int, str] = {}
    """Versions that it couldn't serve, and why."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's entry in the registry; it expires unless it is renewed."""

    schema: int = SCHEMA
    replica: str
    host: str
    engine: str
    slots: int
    busy: int
    state: Literal["starting", "following", "preparing", "prepared", "activating", "serving", "failed", "draining"]
    version: int | None
    detail: str = ""
    at: float
    subscription: Literal["latest", "pinned", "behind", "canary"] = "latest"
    failed: dict[int, str] = {}
    """Versions that it couldn't serve, and why."""
    site: str | msgspec.UnsetType = msgspec.UNSET
    """Where it is; absent: at home."""


_ack = msgspec.msgpack.Decoder(Ack)
_replica = msgspec.msgpack.Decoder(ReplicaInfo)


def decode_policy(data: bytes) -> PolicyMessage:
    return decode(_policy, data, "policy message")


def decode_ack(data: bytes) -> Ack:
    return decode(_ack, data, "ack")


def decode_replica(data: bytes) -> ReplicaInfo:
    return decode(_replica, data, "replica entry")
