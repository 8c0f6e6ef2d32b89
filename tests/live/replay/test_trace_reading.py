"""What a trace reads of a real CONTROL, its beginning purged, is what all that is left of it says."""

from __future__ import annotations

from support.planted_control import Draw, fold
from towline.bundle.source import BusSource
from towline.bus.client import Bus
from towline.bus.topology import CONTROL
from towline.config import BusSettings
from towline.contract.codec import encode
from towline.contract.control import decode_control
from towline.trace.decided import read_decided
from towline.trace.life import Life


async def test_every_sample_of_a_purged_control(bus_settings: BusSettings, run_name: str) -> None:
    bus = await Bus.connect(bus_settings, run=run_name, client_name="test")
    await bus.ensure()
    try:
        draw = Draw(bus.topology, seed=4)
        for subject, record in draw.records:
            await bus.publish(subject, encode(record))
        stream = bus.topology.stream(CONTROL)
        await bus.jetstream.call("purge", f"STREAM.PURGE.{stream}", {"seq": 30})
        left = [(message.sequence, decode_control(message.data)) async for message in bus.read(CONTROL, follow=False)]
        assert left[0][0] == 30
        source = BusSource(bus, None, None, None)  # type: ignore[arg-type]  # neither store nor LOG is read
        known = 0
        for group, size in draw.sizes.items():
            life = Life(run=run_name, group=group, sample=size - 1, control_begins=30)
            await read_decided(source, life, None, 0)
            expected = fold(left, group, size - 1)
            assert [[one.task_sequence, one.reissued, one.cancelled] for one in life.attempts] == expected.attempts
            assert [[one.sequence, one.void_by] for one in life.batches] == expected.batches
            assert (life.dropped, life.requeued, life.prompt_again_in) == (expected.dropped, expected.requeued, expected.again_in)
            assert life.evaluated_version == expected.evaluated
            known += bool(expected.attempts)
        assert 0 < known < len(draw.sizes)
    finally:
        await bus.close()
