"""Replicas that don't all go to the latest version, and replicas that share a host's copies, on a real bus and store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from live.worker.conftest import Start
from live.worker.world import World
from support.waiting import until
from towline.bus.topology import ACKS, REPLICAS
from towline.engine.torch_engine import TorchEngine
from towline.errors import EngineError
from towline.replica.canary import canaries
from towline.replica.fleet import decode_fleet
from towline.replica.host import HostCopies
from unit.engine.models import digest_of


def state_bytes(world: World) -> int:
    return sum(tensor.spec.nbytes for tensor in world.states[0].values())


def flip(path: Path) -> None:
    """One bit, half-way."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def test_a_pinned_replica_serves_its_version_while_others_go_on_and_is_known_as_pinned(world: World, start: Start) -> None:
    world.seed()
    one = world.commit(1)
    running = await start("pinned", subscription="pinned", pinned_version=one)
    await start("free")
    await world.served(one, "pinned")
    two = world.commit(2)
    await world.served(two, "free")
    info = await world.info("pinned")
    assert info is not None
    assert (info.version, info.state, info.subscription) == (one, "serving", "pinned")
    await asyncio.sleep(0.3)
    assert running.worker.replica.version == one
    fleet = decode_fleet(await world.bus.kv(REPLICAS).items(), await world.bus.kv(ACKS).items(), now=0.0)
    assert fleet.serving == {two: 1, one: 1}


async def test_a_replica_pinned_to_a_version_that_is_not_there_yet_says_so_and_waits(world: World, start: Start) -> None:
    world.seed()
    running = await start(subscription="pinned", pinned_version=2)
    await until(lambda: "isn't in the LOG" in running.worker.replica.states.detail)
    assert running.worker.not_ready is not None
    assert world.commit(1) == 2
    await world.served(2)


async def test_one_that_may_be_behind_activates_less_often(world: World, start: Start) -> None:
    world.seed()
    running = await start(subscription="behind", behind_versions=2)
    await world.served(0)
    for seed in (1, 2):
        world.commit(seed)
    await until(lambda: len(running.worker.replica.lineage.path()) == 3)
    await asyncio.sleep(0.2)
    assert running.worker.replica.version == 0
    latest = world.commit(3)
    await world.served(latest)
    assert running.worker.replica.figures.activations == 2


async def test_the_others_follow_a_canary_and_not_where_it_fails(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.seed()
    names = ["a", "b", "c"]
    [canary] = canaries(names, 0.1)
    canaried: dict[str, Any] = {"subscription": "canary", "canary_share": 0.1, "canary_seconds": 0.5, "slots": 2}
    running = {name: (await start(name, hold_seconds=0.5, **canaried)).worker.replica for name in names}
    await until(lambda: {replica.version for replica in running.values()} == {0}, 30.0)
    served: list[tuple[str, int | None]] = []
    for name, replica in running.items():
        replica.on_version = lambda name=name, replica=replica: served.append((name, replica.version))  # type: ignore[misc]
    good = world.commit(1)
    await until(lambda: {replica.version for replica in running.values()} == {good}, 30.0)
    assert served[0] == (canary, good)
    bad = world.commit(2, probe_shift=1.0)
    await until(lambda: bad in running[canary].figures.failed)
    await asyncio.sleep(1.0)
    assert all(replica.version == good for replica in running.values())
    assert all(bad not in running[name].figures.failed for name in names if name != canary), "nobody else tried it"


async def test_replicas_of_a_host_download_a_version_once(world: World, start: Start) -> None:
    world.seed()
    running = [(await start(f"r{index}", slots=2)).worker.replica for index in range(3)]
    await until(lambda: all(replica.version == 0 for replica in running), 30.0)
    before = sum(replica.figures.wire_bytes for replica in running)
    version = world.commit(1)
    for index in range(3):
        ack = await world.served(version, f"r{index}")
        assert ack.files_digest == ack.engine_digest == digest_of(world.states[version])
    assert sum(replica.figures.wire_bytes for replica in running) - before == world.log.version(version).wire_bytes
    files = sorted(path.name for path in (world.folder / "host-copies").glob("*.safetensors"))
    assert files == ["v00000000.safetensors", f"v{version:08d}.safetensors"]


async def test_a_replica_that_comes_back_begins_with_the_host_s_copy(world: World, start: Start) -> None:
    world.seed()
    first = await start()
    await world.served(0)
    version = world.commit(1)
    await world.served(version)
    await first.kill()
    for part in (world.folder / "store").glob("**/versions/**/part-*"):
        part.unlink()
    again = await start()
    await until(lambda: again.worker.replica.version == version)
    assert again.worker.replica.figures.wire_bytes == 0
    assert again.worker.replica.figures.activations == 1, "the engine was started on it"


async def test_in_place_a_version_that_fails_its_proof_is_undone(world: World, start: Start) -> None:
    world.seed()
    running = await start(copy_budget_bytes=state_bytes(world), hold_seconds=0.5)
    await world.served(0)
    good = world.commit(1)
    await world.served(good)
    bad = world.commit(2, probe_shift=-0.01)
    replica = running.worker.replica
    await until(lambda: bad in replica.figures.failed and replica.states.state == "serving")
    assert running.worker._engine.version == good
    await world.task(1)
    assert (await world.trajectory(1)).version_end == good
    host = HostCopies(world.folder / "host-copies", world.run)
    assert [(copy.version, copy.state) for copy in host.record().copies] == [(good, "good")]
    later = world.commit(3)
    ack = await world.served(later)
    assert ack.engine_digest == digest_of(world.states[later])
    info = await world.info("w")
    assert info is not None
    assert set(info.failed) == {bad}
    assert set(ack.failed) == {bad}


async def test_a_corrupt_version_at_the_start_is_passed_over_for_the_one_before(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("towline.replica.prepare.CORRUPT_TRIES", 2)
    world.seed()
    good = world.commit(1)
    bad = world.commit(2)
    [part] = (world.folder / "store" / world.log.version(bad).folder).glob("part-*")
    flip(part)
    running = await start()
    ack = await world.served(good)
    assert set(ack.failed) == {bad}
    assert running.worker._engine.version == good


async def test_a_version_that_retention_gave_up_or_whose_parts_stay_away_fails_and_the_next_is_tried(
    world: World, start: Start
) -> None:
    world.seed()
    running = await start(missing_seconds=0.5)
    await world.served(0)
    lost = world.commit(1)
    entry = world.log.version(lost)
    for part in (world.folder / "store" / entry.folder).glob("part-*"):
        part.unlink()
    replica = running.worker.replica
    await until(lambda: lost in replica.figures.failed and replica.states.state == "serving")
    assert replica.version == 0
    assert f"failed: version {lost}" in replica.states.detail


async def test_without_any_version_that_can_be_had_the_worker_ends_with_the_reason(
    world: World, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.seed()
    monkeypatch.setattr("towline.replica.prepare.CORRUPT_TRIES", 1)
    [weights] = (world.folder / "store").glob("**/anchors/**/model.safetensors")
    flip(weights)
    running = await start()
    with pytest.raises(EngineError, match="no version can be served; version 0"):
        await asyncio.wait_for(asyncio.shield(running.ended), 20.0)
    assert not isinstance(running.worker._engine, TorchEngine) or running.worker._engine.version is None
    running.ended = asyncio.create_task(asyncio.sleep(0, "drained"))
