"""A replica on a real bus and store: it follows the line, proves what it serves, and stays for open evaluations."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from live.worker.conftest import Start
from live.worker.world import TOLERANCE, World
from support.waiting import until
from towline.contract.entries import LogEntry, VersionEntry
from towline.contract.task import SamplingParams
from towline.engine.torch_engine import TorchEngine
from towline.errors import EngineError
from towline.replica.replica import Replica
from towline.store.lineage import Lineage
from unit.engine.models import digest_of

LONG = SamplingParams(max_tokens=1500)


async def test_each_version_is_served_proved_and_acknowledged(world: World, start: Start) -> None:
    world.seed()
    await start()
    first = await world.served(0)
    assert (first.mode, first.files_digest, first.engine_digest) == ("initial", digest_of(world.states[0]), first.files_digest)
    version = world.commit(1)
    ack = await world.served(version)
    assert (ack.mode, ack.files_digest, ack.engine_digest) == ("retract", digest_of(world.states[version]), ack.files_digest)
    assert ack.probe_max_abs_diff is not None
    assert ack.probe_max_abs_diff < 1e-5
    assert ack.probe_tolerance == TOLERANCE
    entry = world.log.entry(version)
    assert isinstance(entry, VersionEntry)
    assert ack.wire_bytes == entry.wire_bytes
    assert ack.prepare_seconds > 0
    info = await world.info("w")
    assert info is not None
    assert (info.state, info.version, info.slots, info.engine) == ("serving", version, 16, "torch")


async def test_a_version_whose_probe_differs_is_never_advertised_and_the_last_good_one_serves_on(
    world: World, start: Start
) -> None:
    world.seed()
    running = await start(hold_seconds=0.5)
    await world.served(0)
    bad = world.commit(1, probe_shift=-0.01)
    await until(lambda: bad in running.worker.replica.figures.failed)
    assert "probe differ by 0.01" in running.worker.replica.figures.failed[bad]
    await until(lambda: running.worker.replica.states.state == "serving")
    assert f"failed: version {bad}" in running.worker.replica.states.detail
    assert running.worker.replica.version == 0
    ack = await world.ack("w")
    assert ack is not None
    assert ack.version == 0
    await world.task(1)
    assert (await world.trajectory(1)).version_end == 0
    good = world.commit(2)
    await world.served(good)


async def test_what_a_version_sampled_before_it_failed_its_proof_is_not_delivered(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.seed()
    running = await start(slots=4)
    await world.served(0)
    probing, judge = asyncio.Event(), asyncio.Event()
    honest = TorchEngine.logprobs

    async def slow(self: TorchEngine, tokens: list[int]) -> list[float]:
        probing.set()
        await judge.wait()
        return await honest(self, tokens)

    monkeypatch.setattr(TorchEngine, "logprobs", slow)
    bad = world.commit(1, probe_shift=1.0)
    await asyncio.wait_for(probing.wait(), 20.0)
    await world.task(1)
    await until(lambda: running.worker.busy == 1)
    await asyncio.sleep(0.2)
    assert await world.trajectories() == {}, "generated, but not vouched for"
    judge.set()
    failure = await world.failure()
    assert failure.stage == "generate"
    assert "failed its proof" in failure.reason
    assert running.worker.replica.figures.failed.keys() == {bad}


async def test_weights_that_do_not_arrive_in_the_engine_are_found_by_the_engine_s_digest(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.seed()
    running = await start()
    await world.served(0)
    honest, calls = TorchEngine.activate, 0

    async def forgetful(self, state, version, mode, changed):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return await honest(self, state, version, mode, set(sorted(changed)[1:]) if calls == 1 else changed)

    monkeypatch.setattr(TorchEngine, "activate", forgetful)
    bad = world.commit(1)
    await until(lambda: bad in running.worker.replica.figures.failed)
    assert "live weights have the digest" in running.worker.replica.figures.failed[bad]


async def test_a_part_that_is_not_there_yet_is_waited_for(world: World, start: Start) -> None:
    world.seed()
    running = await start()
    await world.served(0)
    commit = world.stage(1)
    [part] = (world.folder / "store").glob("**/versions/*/part-00000.safetensors")
    part.rename(away := world.folder / "away")
    version = commit()
    await until(lambda: running.worker.replica.states.state == "preparing")
    await world.task(1)
    assert (await world.trajectory(1)).version_end == 0, "preparing doesn't keep anybody from generating"
    away.rename(part)
    await world.served(version)


async def test_a_part_with_wrong_bytes_fails_the_version_and_is_never_activated(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towline.replica.prepare.CORRUPT_TRIES", 2)
    world.seed()
    running = await start()
    await world.served(0)
    commit = world.stage(1)
    [part] = (world.folder / "store").glob("**/versions/*/part-00000.safetensors")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    version = commit()
    await until(lambda: version in running.worker.replica.figures.failed)
    assert (running.worker.replica.version, running.worker._engine.version) == (0, 0)
    await until(lambda: running.worker.replica.states.state == "serving")


async def test_a_replica_goes_back_after_a_fork(world: World, start: Start) -> None:
    world.seed()
    await start()
    one = world.commit(1)
    await world.served(one)
    world.open(0)
    await world.served(0)
    await world.task(1)
    assert (await world.trajectory(1)).version_start == 0
    other = world.commit(2)
    await world.served(other)
    np.testing.assert_equal(world.log.lineage.depth(other), 1)


async def test_a_started_replica_goes_to_the_latest_without_advertising_the_base(world: World, start: Start) -> None:
    world.seed()
    for seed in (1, 2):
        world.commit(seed)
    running = await start()
    seen = []
    running.worker.replica.on_version = lambda: seen.append(running.worker.replica.version)
    ack = await world.served(world.log.lineage.latest)
    assert seen == [ack.version]
    assert ack.mode == "initial"


async def test_a_log_that_is_read_slowly_is_read_whole_before_a_version_is_chosen(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.seed()
    newest = [world.commit(seed) for seed in (1, 2, 3)][-1]
    extend, serve = Lineage.extend, Replica._serve

    def slowly(self: Lineage, entry: LogEntry) -> None:
        extend(self, entry)
        time.sleep(0.3)

    async def later(self: Replica) -> None:
        await asyncio.sleep(0.5)  # the first look comes while the LOG is half read
        await serve(self)

    monkeypatch.setattr(Lineage, "extend", slowly)
    monkeypatch.setattr(Replica, "_serve", later)
    running = await start()
    seen: list[int | None] = []
    running.worker.replica.on_version = lambda: seen.append(running.worker.replica.version)
    await world.served(newest)
    assert seen == [newest]


async def test_an_open_evaluation_is_served_to_its_end_before_the_replica_moves_on(world: World, start: Start) -> None:
    world.seed()
    running = await start()
    await world.served(0)
    for sample in range(3):
        await world.task(1, sample, version=0)
    assert (await world.trajectory(1, 2)).version_start == 0
    newer = world.commit(1)
    await asyncio.sleep(0.4)
    assert running.worker.replica.version == 0, "its evaluation isn't closed"
    await world.close_eval(0)
    await world.served(newer)


async def test_an_eval_version_is_not_skipped_even_by_a_replica_that_comes_late(world: World, start: Start) -> None:
    world.seed()
    one = world.commit(1)
    two = world.commit(2)
    await world.task(1, version=one)
    running = await start()
    ack = await world.served(one)
    assert (await world.trajectory(1)).version_spans[0].version == one
    assert ack.mode == "initial"
    assert running.worker.replica.version == one
    await world.close_eval(one)
    await world.served(two)


async def test_an_evaluation_that_nobody_closes_holds_for_its_time_and_its_samples_then_move(world: World, start: Start) -> None:
    world.seed()
    running = await start()
    await world.served(0)
    began = time.monotonic()
    await world.task(1, version=0, sampling=LONG)
    await until(lambda: running.worker.busy == 1)
    newer = world.commit(1)
    await world.served(newer)
    assert time.monotonic() - began > 0.5

    async def settled() -> bool:
        return len(await world.failures()) + len(await world.trajectories()) > 0

    await until(settled)
    failures = await world.failures()
    trajectories = await world.trajectories()
    assert len(failures) + len(trajectories) == 1
    assert all(failure.stage == "version_moved" for failure in failures)
    assert all(span.version == 0 for trajectory in trajectories.values() for span in trajectory.version_spans)


async def test_an_engine_that_dies_ends_the_worker_so_that_it_is_started_anew(world: World, start: Start) -> None:
    world.seed()
    running = await start()
    await world.served(0)
    engine = running.worker._engine
    assert isinstance(engine, TorchEngine)
    engine._failure = EngineError("out of memory", code="engine_failed")
    with pytest.raises(EngineError, match="out of memory"):
        await asyncio.wait_for(asyncio.shield(running.ended), 60.0)
    running.ended = asyncio.create_task(asyncio.sleep(0, "drained"))
