"""Looks at the bus: whether it answers, is new enough, has room, and tells the same time. It writes nothing."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator

from towline.bus.client import Bus
from towline.bus.topology import BUCKET_BYTES, BUCKETS, CONTROL, STREAMS
from towline.bus.wire import ApiError, timestamp
from towline.config import BusSettings
from towline.doctor.finding import Finding, fault, ok, warning
from towline.errors import MissingError, TowlineError, UsageError

LEAST_VERSION = (2, 12)
"""The first with atomic batches, which CONTROL's groups are."""
CLOCK_SECONDS = 2.0
"""Deadlines and ages are judged by several machines' clocks."""
FULL_SHARE = 0.8
SMALL_PAYLOAD_BYTES = 1 << 20
PATIENCE_SECONDS = 5.0


async def look_at_bus(settings: BusSettings, run: str) -> AsyncIterator[Finding]:
    """Findings, the first one about the connection; where it fails there are no more."""
    where = settings.url
    try:
        bus = await Bus.connect(settings, run=run, client_name=f"doctor-{run}", patience_seconds=PATIENCE_SECONDS)
    except UsageError as error:
        yield fault(
            "bus", error.message, "set bus.url, and bus.user, password, token or credentials_file as the server wants them"
        )
        return
    except TowlineError as error:
        yield fault("bus", error.message, "start the nats-server, or correct bus.url; is a firewall between?")
        return
    try:
        yield ok("bus", f"connected to nats-server {bus.connection.server_version} at {bus.connection.address}")
        for look in (_version, _payload, _room, _streams):
            async for finding in look(bus, settings):
                yield finding
    except TowlineError as error:
        yield fault("bus", f"{where}: {error.message}", "JetStream must be on, and this user must be allowed to use it")
    finally:
        await bus.close()


async def _version(bus: Bus, settings: BusSettings) -> AsyncIterator[Finding]:
    found = re.match(r"(\d+)\.(\d+)", bus.connection.server_version)
    if found is None or (int(found[1]), int(found[2])) < LEAST_VERSION:
        needed = ".".join(map(str, LEAST_VERSION))
        yield fault("bus", f"nats-server {bus.connection.server_version} has no atomic batches", f"use {needed} or newer")


async def _payload(bus: Bus, settings: BusSettings) -> AsyncIterator[Finding]:
    if bus.max_payload <= SMALL_PAYLOAD_BYTES:
        yield warning(
            "bus",
            f"max_payload is {bus.max_payload:,} bytes: longer trajectories take the way through the store",
            "set max_payload: 8MB in the server's configuration where trajectories are long",
        )


async def _room(bus: Bus, settings: BusSettings) -> AsyncIterator[Finding]:
    """The account's storage, for a run that has no streams yet."""
    try:
        account = await bus.jetstream.call("look at JetStream", "INFO")
    except ApiError as error:
        yield fault("bus", f"JetStream: {error}", "add a jetstream { } block to the server's configuration")
        return
    limit, reserved = account["limits"]["max_storage"], account.get("reserved_storage", account["storage"])
    budget = settings.budget_bytes
    try:
        await bus.stream_state(CONTROL)
    except MissingError:
        if 0 <= limit < reserved + budget:
            yield fault(
                "bus",
                f"the account may store {limit:,} bytes, {reserved:,} are reserved, and the run wants {budget:,}",
                "lower bus.budget_bytes, remove old runs' streams, or raise the account's limit",
            )
    if settings.replicas == 1:
        yield ok(
            "bus",
            "one copy of each stream: safe against kill -9; a power cut may take the newest records (sync_interval: always in "
            "the server's configuration, or bus.replicas = 3)",
        )


async def _streams(bus: Bus, settings: BusSettings) -> AsyncIterator[Finding]:
    for spec in STREAMS:
        name = bus.topology.stream(spec)
        asked = time.time()
        try:
            info = await bus.jetstream.call(f"look at {name}", f"STREAM.INFO.{name}")
        except ApiError:
            yield ok(
                "bus", f"the run has no streams yet; {settings.budget_bytes - BUCKET_BYTES * len(BUCKETS):,} bytes will be theirs"
            )
            return
        used, limit = info["state"]["bytes"], info["config"]["max_bytes"]
        if used > FULL_SHARE * limit:
            yield warning(
                "bus",
                f"stream {name} is {used / limit:.0%} full; when it's full the run stands still until there is room",
                "set buffer.keep_history = false, or raise bus.budget_bytes and start the services again",
            )
        if spec is CONTROL:
            skew = timestamp(info["ts"]) - (asked + time.time()) / 2
            if abs(skew) > CLOCK_SECONDS:
                yield warning("clock", f"the bus's clock is {skew:+.1f} s off this machine's", "run NTP on both")
            else:
                yield ok("clock", f"the bus's is within {CLOCK_SECONDS:g} s of this machine's")
