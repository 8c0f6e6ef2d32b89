"""What comes from outside while the buffer dies: groups that others sampled, and prompts asked for again."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace

from fault.field import FAULTY, Field, field
from fault.test_fault_points import ON_REQUEST
from towline.bus.client import Bus
from towline.bus.topology import TRAJECTORY
from towline.cli.requeueing import requeue
from towline.contract.groups import EXTERNAL, external_group
from towline.contract.trajectory import Trajectory, decode_trajectory, encode_trajectory
from towline.errors import UsageError

GROUP_SIZE = 4


async def offer(bus: Bus, group: list[Trajectory], name: str) -> None:
    """The same samples, as somebody outside would send them who happened to sample them."""
    number = external_group(name)
    for trajectory in group:
        sent = replace(trajectory, group=number, lane=EXTERNAL, task_sequence=0, attempt=0)
        await bus.create(bus.topology.trajectory(number, sent.sample), encode_trajectory(sent))


async def keep_offering(bus: Bus, run: Field) -> None:
    """Offers every third whole group once more, until the run ends."""
    seen: dict[int, list[Trajectory]] = defaultdict(list)
    start = 1
    while not run.is_done():
        async for message in bus.read(TRAJECTORY, start=start, follow=False):
            start = message.sequence + 1
            trajectory = decode_trajectory(message.data)
            if trajectory.lane == "train" and trajectory.group % 3 == 0:
                seen[trajectory.group].append(trajectory)
                if len(seen[trajectory.group]) == GROUP_SIZE:
                    await offer(bus, seen[trajectory.group], f"again-{trajectory.group}")
        await asyncio.sleep(0.1)


async def keep_asking(bus: Bus, run: Field) -> None:
    """Asks for every dropped prompt, until the run ends."""
    while not run.is_done():
        try:
            await requeue(bus, run.settings.run.steps, sequences=None, stage=None, wait_seconds=0.2)
        except UsageError as error:
            assert error.code == "run_ended"  # noqa: PT017  anything else is a fault
        await asyncio.sleep(0.1)


def test_groups_from_outside_and_requests_survive_the_buffer_s_deaths(zygote, tmp_path):
    async def meanwhile(run: Field) -> None:
        bus = await run.connect()
        await bus.ensure()
        try:
            ended = asyncio.to_thread(run.until, run.is_done, "the run never ended")
            await asyncio.gather(keep_offering(bus, run), keep_asking(bus, run), ended)
        finally:
            await bus.close()

    with field(zygote, tmp_path, die_at=ON_REQUEST, run__steps=30, buffer__max_staleness=2, **FAULTY) as run:
        asyncio.run(meanwhile(run))
        run.assert_ended_well()
        assert run.died_at() == set(ON_REQUEST)
