"""A run around a worker: a real bus, a store in a folder, and by hand what trainer, publisher and buffer would write."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import until
from towline.bus.client import Bus
from towline.bus.topology import ACKS, OUTCOME, REPLICAS, TRAJECTORY
from towline.config import (
    BusSettings,
    EvalSettings,
    ModelSettings,
    PromptSettings,
    RewardSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    ServiceSettings,
    Settings,
    StoreSettings,
)
from towline.contract.codec import encode
from towline.contract.control import CancelRecord, ControlRecord, EndRecord, EvalRecord, TaskRecord
from towline.contract.entries import OpenEntry, Probe, VersionEntry
from towline.contract.outcome import Failure, decode_outcome
from towline.contract.policy import Ack, ReplicaInfo, decode_ack, decode_replica
from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.delta.state import ModelState
from towline.store import keys
from towline.store.log import Log
from towline.store.objects import open_store
from towline.store.versions import VersionFacts, seed_base, write_version
from unit.engine.models import make_model, plain_logprobs, save, state_of

PROBE_TOKENS = (1, 5, 9, 33, 2, 60, 7)
TOLERANCE = 1e-3
CONTEXT = 2048


class World:
    """`run` is its name. Model n is the tiny one with seed n; version numbers are the LOG's."""

    def __init__(self, bus: Bus, folder: Path, run: str) -> None:
        self.bus, self.run, self.folder = bus, run, folder
        self.objects = open_store(StoreSettings(url=(folder / "store").as_uri()))
        self.log = Log(self.objects, run)
        self.states: dict[int, ModelState] = {}
        self.models: dict[int, Any] = {}
        self._stamp = 0

    def settings(self, *, buffer: dict[str, Any] | None = None, **rollout: Any) -> Settings:
        return Settings(
            run=RunSettings(name=self.run, steps=100),
            bus=BusSettings(),
            model=ModelSettings(source="tiny"),
            prompts=PromptSettings(source="a:b"),
            sampling=SamplingSettings(max_tokens=8),
            buffer={"max_staleness": 1} | (buffer or {}),
            eval=EvalSettings(every=4, exact_hold_seconds=1.5),
            rollout=RolloutSettings(**({"slots": 16, "poll_seconds": 0.05, "hold_seconds": 10.0} | rollout)),
            reward=RewardSettings(function="a:b"),
            service=ServiceSettings(drain_seconds=3.0),
        )

    # The trainer's and the publisher's side

    def seed(self, *, probe_shift: float = 0.0) -> None:
        """Entry 0 (model 0) and entry 1, its `open`."""
        model = make_model("qwen3-tied", 0, context=CONTEXT)
        folder = save(model, self.folder / "base")
        seed_base(self.objects, self.log, folder, "tiny", None, probe_of(model, probe_shift))
        self.states[0], self.models[0] = state_of(model), model
        self.open(0)

    def open(self, base: int) -> int:
        write_id = keys.new_write_id()
        entry = self.log.append(
            lambda log: OpenEntry(
                number=log.next_number, prev=log.head_digest, write_id=write_id, at=time.time(), base=base,
                base_digest=log.digest(base), depth=log.lineage.depth(base), batch_cursor=0, checkpoint=None,
            )
        )  # fmt: skip
        return entry.number

    def commit(self, seed: int, *, probe_shift: float = 0.0) -> int:
        """A version of model `seed` on the newest epoch's head; its number."""
        return self.stage(seed, probe_shift=probe_shift)()

    def stage(self, seed: int, *, probe_shift: float = 0.0) -> Callable[[], int]:
        """`commit` in two halves: everything is uploaded now, the entry is written by calling the result."""
        lineage, write_id = self.log.lineage, keys.new_write_id()
        epoch = lineage.newest_epoch
        assert epoch is not None
        base = lineage.epoch_head(epoch)
        model = make_model("qwen3-tied", seed, context=CONTEXT)
        state, depth = state_of(model), lineage.depth(base) + 1
        manifest = write_version(
            self.objects, self.run, epoch=epoch, base=base, write_id=write_id, base_state=self.states[base], new_state=state,
            facts=VersionFacts(depth=depth, step=depth, batch_cursor=0, probe=probe_of(model, probe_shift)),
        )  # fmt: skip

        def build(log: Log) -> VersionEntry:
            return VersionEntry(
                number=log.next_number, prev=log.head_digest, write_id=write_id, at=time.time(), epoch=epoch, base=base,
                base_digest=log.digest(base), depth=depth, skipped=(), representation="delta", codec=manifest.codec,
                folder=manifest.folder, manifest_digest=manifest.digest, layout_digest=manifest.layout_digest,
                model_digest=manifest.model_digest, density=manifest.density, wire_bytes=manifest.wire_bytes,
                model_bytes=manifest.model_bytes, step=depth, batch_cursor=0, checkpoint=None, probe=manifest.facts.probe,
                encode_seconds=0.0, upload_seconds=0.0, verify_seconds=0.0,
            )  # fmt: skip

        def commit() -> int:
            number = self.log.append(build).number
            self.states[number], self.models[number] = state, model
            return number

        return commit

    # The buffer's side

    async def task(self, group: int, sample: int = 0, *, version: int | None = None, **fields: Any) -> int:
        """Admit a sample; its task sequence. `version`: an evaluation of it."""
        lane = "train" if version is None else "eval"
        defaults: dict[str, Any] = {
            "run": self.run, "lane": lane, "group": group, "sample": sample, "group_size": 4,
            "prompt": pack_tokens([3, 1, 4, 1, 5, 9, 2, 6][: 3 + sample % 5]), "prompt_ref": PromptRef("s", 0, group),
            "cursor": Cursor(0, group), "sampling": SamplingParams(max_tokens=8, stop_token_ids=(11,)),
            "seed": 100 * group + sample, "not_before_depth": 0, "exact_version": version,
            "admitted_at": time.time(), "deadline": time.time() + 600,
            "reference": {"answer": "42"},
        }  # fmt: skip
        task = Task(**(defaults | fields))
        return await self.append(TaskRecord(writer=self.stamp(), task=task), self.bus.topology.task(lane, version))

    async def close_eval(self, version: int) -> None:
        depth = self.log.lineage.depth(version)
        await self.append(
            EvalRecord(writer=self.stamp(), version=version, depth=depth, wanted=1, rows=(), mean=None),
            self.bus.topology.control("eval"),
        )

    async def cancel(self, group: int, sample: int, sequence: int) -> None:
        await self.append(
            CancelRecord(writer=self.stamp(), group=group, sample=sample, task_sequence=sequence, reason="test"),
            self.bus.topology.control("cancel"),
        )

    async def end(self) -> None:
        await self.append(EndRecord(writer=self.stamp(), reason="end_of_data", depth=9), self.bus.topology.control("end"))

    async def append(self, record: ControlRecord, subject: str) -> int:
        return await self.bus.publish(subject, encode(record))

    def stamp(self) -> str:
        self._stamp += 1
        return f"test/{self._stamp}"

    # What came of it

    async def trajectories(self) -> dict[tuple[int, int], Trajectory]:
        found: dict[tuple[int, int], Trajectory] = {}
        async for message in self.bus.read(TRAJECTORY, follow=False):
            trajectory = decode_trajectory(message.data)
            assert (trajectory.group, trajectory.sample) not in found, "two trajectories of one sample"
            found[trajectory.group, trajectory.sample] = trajectory
        return found

    async def trajectory(self, group: int, sample: int = 0, *, seconds: float = 60.0) -> Trajectory:
        """Waits for it."""
        subject = self.bus.topology.trajectory(group, sample)
        await until(lambda: self._is_there(subject), seconds)
        message = await self.bus.last(TRAJECTORY, subject)
        assert message is not None
        return decode_trajectory(message.data)

    async def _is_there(self, subject: str) -> bool:
        return await self.bus.last(TRAJECTORY, subject) is not None

    async def failures(self) -> list[Failure]:
        found = []
        async for message in self.bus.read(OUTCOME, follow=False):
            outcome = decode_outcome(message.data)
            assert isinstance(outcome, Failure)
            found.append(outcome)
        return found

    async def failure(self, seconds: float = 60.0) -> Failure:
        """Waits for the first."""
        found: list[Failure] = []

        async def there() -> bool:
            found[:] = await self.failures()
            return bool(found)

        await until(there, seconds)
        return found[0]

    async def unacked(self, lane: str = "train", version: int | None = None) -> tuple[int, int]:
        """(delivered but not acked, not delivered yet) of the lane's consumer."""
        spec = self.bus.topology.lane_consumer(lane, 1, version)
        info = await self.bus.jetstream.call("info", f"CONSUMER.INFO.{spec.stream}.{spec.durable}", {})
        return int(info["num_ack_pending"]), int(info["num_pending"])

    async def ack(self, replica: str) -> Ack | None:
        value = await self.bus.kv(ACKS).get(replica)
        return None if value is None else decode_ack(value)

    async def info(self, replica: str) -> ReplicaInfo | None:
        value = await self.bus.kv(REPLICAS).get(replica)
        return None if value is None else decode_replica(value)

    async def served(self, version: int, replica: str = "w", seconds: float = 60.0) -> Ack:
        """Waits until the replica has acknowledged the version."""

        async def there() -> bool:
            ack = await self.ack(replica)
            return ack is not None and ack.version == version

        await until(there, seconds)
        ack = await self.ack(replica)
        assert ack is not None
        return ack


def probe_of(model: Any, shift: float = 0.0) -> Probe:
    logprobs = plain_logprobs(model, list(PROBE_TOKENS))
    return Probe(tokens=PROBE_TOKENS, logprobs=tuple(value + shift for value in logprobs), tolerance=TOLERANCE)
