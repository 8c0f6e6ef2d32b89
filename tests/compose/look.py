"""Run inside a container that has the operator's keys: prints where the run stands, one line of JSON, from the bus alone."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from towline.access.identity import as_role
from towline.bus.client import Bus
from towline.bus.topology import ACKS, REPLICAS, STATUS
from towline.config import load_settings
from towline.contract.policy import decode_ack, decode_replica


async def look(path: str) -> dict[str, object]:
    settings = as_role(load_settings(Path(path)), "operator")
    bus = await Bus.connect(settings.bus, run=settings.run.name, client_name="look")
    try:
        replicas = [decode_replica(data).replica for data in (await bus.kv(REPLICAS).items()).values()]
        acks = [decode_ack(data) for data in (await bus.kv(ACKS).items()).values()]
        statuses = [json.loads(data) for data in (await bus.kv(STATUS).items()).values()]
    finally:
        await bus.close()
    figures = {f"{status['service']}.{status['replica']}": status["figures"] for status in statuses}
    return {
        "acknowledged": {ack.replica: ack.history[-1].depth for ack in acks if ack.replica in replicas and ack.history},
        "replicas": sorted(replicas),
        "reward": next((told["reward_mean"] for name, told in figures.items() if name.startswith("trainer.")), None),
    }


print(json.dumps(asyncio.run(look(sys.argv[1]))))
