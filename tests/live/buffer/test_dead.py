"""`towline dead`: what nobody could act on is kept whole and can be looked at."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from live.buffer.harness import Fleet, Trainer, connected, leading, records, seed, settings_for, working
from live.buffer.test_process import write_toml
from support.waiting import until
from towline.audit.run import audit
from towline.bus.client import Bus
from towline.bus.topology import CONTROL, DEAD
from towline.config import BusSettings, StoreSettings
from towline.contract.codec import encode
from towline.contract.control import DropRecord, RequeueRecord, TaskRecord, decode_control
from towline.contract.outcome import Failure
from towline.contract.requests import RequeueRequest, request_stage
from towline.store.log import Log


def towline(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "towline.cli.main", "dead", *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


async def test_dead_letters_are_listed_and_shown_whole(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings)
    config = str(write_toml(tmp_path / "run.toml", settings))
    garbage = b"\x00not an outcome"
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        async with leading(settings, bus, objects) as leader:
            await until(lambda: bool(leader.state.open_train))
            await bus.publish(bus.topology.failure(0, 0), garbage)

            async def is_dead() -> bool:
                return (await bus.stream_state(DEAD)).messages == 1

            await until(is_dead)
        await bus.dead("reward", b"x" * 10, "a  second\nreason", failure="verify")
        listed = await asyncio.to_thread(towline, "list", config, "--json")
        only = await asyncio.to_thread(towline, "list", config, "--stage", "reward")
        shown = await asyncio.to_thread(towline, "show", config, "1", "--json")
        raw = await asyncio.to_thread(towline, "show", config, "1", "--raw")
        missing = await asyncio.to_thread(towline, "show", config, "9")
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [(row["sequence"], row["stage"], row["nbytes"]) for row in rows] == [(1, "outcome", 15), (2, "reward", 10)]
    assert rows[0]["context"]["subject"] == f"towline.{run_name}.outcome.failure.0.0"
    assert rows[1]["reason"] == "a second reason"
    assert only.stdout.decode().splitlines()[-1] == "1 reward"
    assert json.loads(shown.stdout)["content"] == {"unreadable": garbage.hex()}
    assert raw.stdout == garbage
    assert missing.returncode == 1
    assert missing.stderr.decode().strip().endswith("has no dead letter 9; see `towline dead list`")


async def fail(bus: Bus, group: int, sample: int) -> None:
    """As reward gives a sample up: the letter, then the final failure."""
    topology = bus.topology
    await bus.dead(
        "reward", b"no trajectory", "it can't be verified", failure="verify", subject=topology.trajectory(group, sample)
    )
    failure = Failure(run=topology.run, lane="train", group=group, sample=sample, task_sequence=0, delivery=3, stage="verify",
                      final=True, reason="r", replica="reward.0")  # fmt: skip
    await bus.publish(topology.failure(group, sample), encode(failure))


async def test_a_dropped_groups_prompt_is_admitted_again_on_request_once_and_only_what_makes_sense(
    run_name: str, bus_settings: BusSettings, file_store_settings: StoreSettings, tmp_path: Path
) -> None:
    settings = settings_for(run_name, bus_settings, file_store_settings, run={"name": run_name, "steps": 3}, eval={"every": 0})
    config = str(write_toml(tmp_path / "run.toml", settings))
    async with connected(settings) as (bus, objects):
        await seed(objects, run_name)
        trainer = Trainer(bus, objects, settings)
        await trainer.train(until_depth=0)
        async with leading(settings, bus, objects) as leader:
            await until(lambda: len(leader.state.open_train) == 4)
            await fail(bus, 0, 0)
            await fail(bus, 0, 1)
            await fail(bus, 1, 1)
            await until(lambda: leader.state.dropped == {"verify_failed": 4})
            await bus.dead("publisher", b"staged?", "can't be read", sequence=3)
            await bus.dead("outcome", b"outcome?", "can't be read", subject=bus.topology.score(2, 0))
            first = await asyncio.to_thread(towline, "requeue", config, "2", "--json")
            again = await asyncio.to_thread(towline, "requeue", config, "1", "2", "--json")
            wrong = await asyncio.to_thread(towline, "requeue", config, "4", "5", "--json")
            missing = await asyncio.to_thread(towline, "requeue", config, "99")
            nothing = await asyncio.to_thread(towline, "requeue", config)
        # No buffer runs: the request waits for one.
        later = await asyncio.to_thread(towline, "requeue", config, "--all", "--stage", "reward", "--wait", "0.5", "--json")
        asked = await asyncio.to_thread(towline, "list", config, "--json")
        # A request that points to something else, and one of another run, change nothing.
        drop = next(r for r in await placed(bus) if isinstance(r[1], DropRecord) and r[1].group == 0)
        task = next(r for r in await placed(bus) if isinstance(r[1], TaskRecord) and r[1].task.group == 2)
        for number, run in ((40, run_name), (41, "another")):
            forged = RequeueRequest(run=run, dead=number, task_sequence=task[0], drop_sequence=drop[0])
            await bus.create(bus.topology.dead(request_stage(number)), encode(forged))
        await bus.create(bus.topology.dead(request_stage(42)), b"nonsense")
        async with leading(settings, bus, objects) as leader:
            await until(lambda: leader.requests.refused == 3 and len(leader.state.requeued) == 2)
            async with working(Fleet(bus, objects, settings)):
                await trainer.train(until_depth=3)
                await until(lambda: leader.finished)
        over = await asyncio.to_thread(towline, "requeue", config, "--all")
        listed = await asyncio.to_thread(towline, "list", config, "--json")
        standing = await records(bus)
        report = await audit(bus, Log(objects, run_name), settings)
    assert (first.returncode, answers(first)) == (0, [(2, 0, "requeued")])
    assert (again.returncode, answers(again)) == (0, [(1, 0, "requeued"), (2, 0, "requeued")])
    assert (wrong.returncode, answers(wrong)) == (1, [(4, None, "refused"), (5, 2, "refused")])
    assert missing.stderr.decode().strip().endswith("has no dead letter 99; see `towline dead list`")
    assert nothing.returncode == 2
    assert answers(later) == [(1, 0, "requeued"), (2, 0, "requeued"), (3, 1, "asked")]
    assert over.returncode == 2
    assert "run has ended" in over.stderr.decode()
    assert column(asked) == {1: "requeued", 2: "requeued", 3: "asked", 4: "", 5: ""}
    assert column(listed) == {1: "requeued", 2: "requeued", 3: "requeued", 4: "", 5: ""}
    granted = [record for record in standing if isinstance(record, RequeueRecord)]
    assert [(record.dead, record.group) for record in granted] == [(2, 0), (3, 1)]
    for old in (0, 1):
        prompt = next(r.task.prompt for r in standing if isinstance(r, TaskRecord) and r.task.group == old)
        new = [r.task for r in standing if isinstance(r, TaskRecord) and r.requeues == old]
        assert [(task.sample, task.prompt) for task in new] == [(0, prompt), (1, prompt)]
        assert new[0].group == new[1].group != old
    assert report.clean, report.lines()


def answers(ran: subprocess.CompletedProcess[bytes]) -> list[tuple[int, int | None, str]]:
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return [(row["sequence"], row["group"], row["state"]) for row in rows]


def column(ran: subprocess.CompletedProcess[bytes]) -> dict[int, str]:
    return {row["sequence"]: row["requeue"] for row in map(json.loads, ran.stdout.splitlines())}


async def placed(bus: Bus) -> list[tuple[int, object]]:
    return [(message.sequence, decode_control(message.data)) async for message in bus.read(CONTROL, follow=False)]
