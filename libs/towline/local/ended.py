"""What `towline up` says of a run that has ended: why it did, and how to go on from there."""

from __future__ import annotations

from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.contract.control import VERIFY_FAILED_ALL, EndRecord, decode_control

_FORK = "`towline run fork {run} --from latest` goes on from its last version"
_WAYS = {
    "steps": "has all its steps: --steps goes on with it, --run NAME begins another",
    "end_of_data": f"has used up its prompts, whatever --steps says: {_FORK} with other prompts, --run NAME begins another",
    VERIFY_FAILED_ALL: "was ended since reward.function failed on group after group: see `towline dead list {run}`, "
    f"put it right, then {_FORK}",
}
_OTHER = f"was ended ({{reason}}), and --steps doesn't take that back: {_FORK}, --run NAME begins another"


async def why_ended(bus: Bus, run: str) -> str:
    """Of a run whose end stands."""
    message = await bus.last(CONTROL, bus.topology.control("end"))
    record = None if message is None else decode_control(message.data)
    return ended_line(run, record.reason if isinstance(record, EndRecord) else "steps")


def ended_line(run: str, reason: str) -> str:
    """`reason` is the end record's."""
    return f"run {run} has ended already: it " + _WAYS.get(reason, _OTHER).format(run=run, reason=reason)
