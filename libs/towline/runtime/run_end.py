"""Whether the run is over, as CONTROL says: what every service but the buffer exits on."""

from __future__ import annotations

from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.contract.control import EndRecord, ForkRecord, decode_control
from towline.contract.task import SESSION, TRAIN


async def run_has_ended(bus: Bus, steps: int) -> bool:
    """Whether the last `end` stands: nothing was admitted after it, no fork went below it, and no more steps are wanted."""
    message = await bus.last(CONTROL, bus.topology.control("end"))
    if message is None:
        return False
    tasks = bus.topology.task
    for subject in (tasks(TRAIN), tasks(SESSION), *(tasks(TRAIN, site=site) for site in bus.topology.sites)):
        admitted = await bus.last(CONTROL, subject)
        if admitted is not None and admitted.sequence > message.sequence:
            return False
    record = decode_control(message.data)
    fork = await bus.last(CONTROL, bus.topology.control("fork"))
    if fork is not None and fork.sequence > message.sequence:
        forked = decode_control(fork.data)
        if isinstance(record, EndRecord) and isinstance(forked, ForkRecord) and forked.depth < record.depth:
            return False
    return isinstance(record, EndRecord) and (record.reason != "steps" or record.depth >= steps)
