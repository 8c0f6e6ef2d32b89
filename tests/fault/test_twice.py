"""What arrives twice counts once: messages again after any duplicate window, samples generated twice, with other tokens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fault.field import FAULTY, Field, field
from towline.bus.client import Bus
from towline.bus.topology import OUTCOME, STATUS, TRAJECTORY, StreamSpec
from towline.contract.codec import encode
from towline.contract.outcome import Score, decode_outcome
from towline.contract.trajectory import decode_trajectory, encode_trajectory

AGAIN = {"Towline-Test": "again"}


def as_it_was(data: bytes, spec: StreamSpec) -> bytes:
    return data


def with_other_content(data: bytes, spec: StreamSpec) -> bytes:
    """The same sample with other tokens; a score of the same trajectory with another reward."""
    if spec is OUTCOME:
        outcome = decode_outcome(data)
        return encode(msgspec.structs.replace(outcome, reward=outcome.reward + 1.0)) if isinstance(outcome, Score) else data
    trajectory = decode_trajectory(data)
    tokens = np.where(trajectory.loss_mask == 1, (trajectory.tokens + 1) % 14, trajectory.tokens).astype(np.int32)
    return encode_trajectory(replace(trajectory, tokens=tokens))


@pytest.mark.parametrize("again", [pytest.param(as_it_was, marks=pytest.mark.slow), with_other_content])
def test_every_message_that_stands_twice_counts_once(zygote, tmp_path, again):
    """As from streams of several sites, or from a publisher whose message id the server has forgotten: no create-only."""

    async def repeat(bus: Bus, spec: StreamSpec, repeated: Counter[str]) -> None:
        async for message in bus.read(spec):
            if AGAIN.keys() <= message.headers.keys():
                continue
            await bus.publish(message.subject, again(message.data, spec), headers=AGAIN)
            repeated[spec.key] += 1

    async def meanwhile(run: Field) -> Counter[str]:
        bus = await run.connect()
        await bus.ensure()
        repeated: Counter[str] = Counter()
        repeaters = [asyncio.create_task(repeat(bus, spec, repeated)) for spec in (TRAJECTORY, OUTCOME)]
        try:
            ending = asyncio.create_task(asyncio.to_thread(run.assert_ended_well))
            await asyncio.wait([ending, *repeaters], return_when=asyncio.FIRST_COMPLETED)
            for repeater in repeaters:
                assert not repeater.done(), repeater.exception()
            await ending
        finally:
            for repeater in repeaters:
                repeater.cancel()
            await asyncio.gather(*repeaters, return_exceptions=True)
            await bus.close()
        return repeated

    with field(zygote, tmp_path, run__steps=8, **FAULTY) as run:
        repeated = asyncio.run(meanwhile(run))
    assert repeated["TRAJECTORY"] >= 8 * 16
    assert repeated["OUTCOME"] >= 8 * 16


def test_a_task_redelivered_while_its_first_worker_still_generates_counts_once(zygote, tmp_path):
    """The first worker hangs for longer than the ack wait; what it had in hand is generated elsewhere; then it goes on."""
    patient = {"buffer__max_staleness": 50, "rollout__ack_wait_seconds": 1.0, "prompts__environment": "fault.faulty:Slow"}

    def figure(run: Field, name: str) -> int:
        status = run.ask(lambda bus: bus.kv(STATUS).get("rollout_worker.0"))
        return 0 if status is None else int(msgspec.json.decode(status)["figures"][name])

    with field(zygote, tmp_path, run__steps=12, eval__every=0, **patient) as run:
        run.until(lambda: figure(run, "busy") > 0, "the worker never had anything to do")
        first = run.pid("rollout_worker")
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        try:
            run.serve("rollout_worker.1")
            run.until_depth(max(run.depth(), 0) + 3)  # what the first has in hand stands by now
        finally:
            os.kill(first, signal.SIGCONT)
        run.until(lambda: figure(run, "superseded") > 0, "nothing was generated twice")
        run.assert_ended_well()
