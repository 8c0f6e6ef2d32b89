"""A small run with one sample of every kind, written record by record: what the web view shows is compared with it.

Its tokenizer's words are hostile: markup that would run, if the page ever took a token for markup.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from live.worker.world import World
from towline.bus.topology import ACKS, REPLICAS
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, BatchRow, DropRecord, EndRecord, EvalRecord, EvalRow, ForkRecord
from towline.contract.groups import external_group
from towline.contract.outcome import Failure, Score
from towline.contract.policy import Ack, ReplicaInfo, Served
from towline.contract.task import PromptRef, SamplingParams, VersionSpan
from towline.contract.trajectory import Segment, Timings, Trajectory, encode_trajectory

SCRIPT, IMAGE, ENTITY = 20, 21, 22
WORDS = {
    SCRIPT: "<script>window.hacked=1</script>", IMAGE: '<img src="x" onerror="window.hacked=2">', ENTITY: "&lt;b&gt;‮",
    23: "\n", 24: " the", 25: " answer", 26: " is", 27: " 42",
}  # fmt: skip
VOCABULARY = 61
ENVIRONMENT = "sums:Calculator"
OUTSIDE = external_group("someone's")


@dataclass
class PlantedRun:
    """Groups: 1, 2 trained (batches for depths 0 and 1), 3 dropped, 4 scored, 5 without scores (sample 0 generated, 1 failed for
    good, its message dead), 6 evaluated, OUTSIDE from outside. `sequences`: of trajectories, by (group, sample)."""

    world: World
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    digests: dict[tuple[int, int], bytes] = field(default_factory=dict)
    tasks: dict[tuple[int, int], int] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    async def plant(self) -> None:
        world = self.world
        folder = world.folder / "base"
        folder.mkdir(parents=True)
        words = {f"w{index}": index for index in range(VOCABULARY) if index not in WORDS} | {t: i for i, t in WORDS.items()}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = decoders.Fuse()
        (folder / "tokenizer.json").write_text(tokenizer.to_str())
        (folder / "tokenizer_config.json").write_text(json.dumps({}))
        world.seed()
        self.versions = [0, world.commit(1), world.commit(2)]
        await world.append(ForkRecord(writer=world.stamp(), epoch=1, base=0, depth=0), world.bus.topology.control("fork"))
        for group, size in ((1, 4), (2, 4), (3, 2), (4, 2)):
            for sample in range(size):
                await self.generated(group, sample, size)
                await self.scored(group, sample, size, reward=sample / 4 if group < 3 else 1.0)
        await self.batch(0, [(1, sample) for sample in range(4)])
        await self.batch(1, [(2, sample) for sample in range(4)])
        await self.control(DropRecord(writer=world.stamp(), lane="train", group=3, samples=2, reason="stale"), "drop")
        await self.generated(5, 0, 2)
        await self.failed(5, 1)
        await self.generated(6, 0, 1, version=self.versions[1])
        await self.scored(6, 0, 1, reward=0.75, lane="eval")
        row = EvalRow(6, 0, self.sequences[6, 0], self.digests[6, 0], 0.75)
        evaluated = EvalRecord(writer=world.stamp(), version=self.versions[1], depth=1, wanted=1, rows=(row,), mean=0.75)
        await self.control(evaluated, "eval")
        await self.generated(OUTSIDE, 0, 1, lane="external")
        await self.scored(OUTSIDE, 0, 1, reward=0.5, lane="external")
        await self.beat()

    async def beat(self) -> None:
        """Two replicas, one of them behind, in the registry, whose entries expire."""
        now, world = time.time(), self.world
        for name, version in (("near", self.versions[2]), ("<b>far</b>", self.versions[1])):
            key = "far" if "far" in name else name
            info = ReplicaInfo(
                replica=key, host="h1", engine="torch", slots=8, busy=3, state="serving", version=version, at=now, detail=""
            )
            await world.bus.kv(REPLICAS).put(key, encode(info))
            history = tuple(
                Served(version=v, depth=d, published_at=world.log.entry(v).at, at=world.log.entry(v).at + 0.5 * (1 + d))
                for d, v in enumerate(self.versions)
                if v <= version
            )
            ack = Ack(
                replica=key, version=version, files_digest="d", engine_digest="d", probe_max_abs_diff=1e-6, probe_tolerance=1e-3,
                prepare_seconds=0.2, pause_seconds=0.01, wire_bytes=100, mode="retract", at=history[-1].at, history=history,
            )  # fmt: skip
            await world.bus.kv(ACKS).put(key, encode(ack))

    async def generated(self, group: int, sample: int, size: int, *, version: int | None = None, lane: str = "train") -> None:
        """Its task and its trajectory: a prompt, the policy's turn, a tool's answer, another turn under the next version."""
        world, first = self.world, 0 if version is None else version
        task = 0
        if lane != "external":
            task = await world.task(group, sample, version=version, group_size=size, environment=ENVIRONMENT)
        self.tasks[group, sample] = task
        tokens = np.array([1, 2, 3, SCRIPT, IMAGE, 24, 23, ENTITY, 30 + sample, 25, 26, 27, 11], np.int32)
        mask = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1], np.uint8)
        logprobs = np.where(mask, -np.geomspace(0.01, 6, tokens.size), np.nan).astype(np.float32)
        last = self.versions[1] if version is None and group == 2 else first
        trajectory = Trajectory(
            run=world.run, lane="eval" if version is not None else lane, group=group, sample=sample, group_size=size,
            task_sequence=task, attempt=0, prompt_ref=PromptRef("s", 0, abs(group) % 1000), reference={"answer": "<i>42</i>"},
            tokens=tokens, loss_mask=mask, logprobs=logprobs,
            version_spans=(VersionSpan(3, 7, first, "start"), VersionSpan(9, 13, last, "start" if last == first else "retract")),
            segments=(Segment(0, 3, "prompt"), Segment(3, 7, "policy"), Segment(7, 9, "tool"), Segment(9, 13, "policy")),
            finish="stop" if sample % 2 == 0 else "length", sampling=SamplingParams(max_tokens=8), seed=2**62 + sample,
            engine="torch", replica="near", timings=Timings(pulled_at=time.time() - 1, finished_at=time.time()),
        )  # fmt: skip
        data = encode_trajectory(trajectory)
        self.sequences[group, sample] = await world.bus.publish(world.bus.topology.trajectory(group, sample), data)
        self.digests[group, sample] = digest(data)

    async def scored(self, group: int, sample: int, size: int, *, reward: float, lane: str = "train") -> None:
        world, last = self.world, self.versions[1] if group == 2 else 0
        first = self.versions[1] if group == 6 else 0
        score = Score(
            run=world.run, lane=lane, group=group, sample=sample, group_size=size, task_sequence=self.tasks[group, sample],
            trajectory_sequence=self.sequences[group, sample], trajectory_digest=self.digests[group, sample], reward=reward,
            components={"<u>exact</u>": reward, "format": 1.0}, verifier="sums:reward", policy_tokens=8, total_tokens=13,
            version_spans=(VersionSpan(3, 7, first, "start"), VersionSpan(9, 13, max(first, last), "retract")),
            finish="stop" if sample % 2 == 0 else "length",
        )  # fmt: skip
        await world.bus.publish(world.bus.topology.score(group, sample), encode(score))

    async def failed(self, group: int, sample: int) -> None:
        world = self.world
        task = await world.task(group, sample, group_size=2, environment=ENVIRONMENT)
        failure = Failure(
            run=world.run, lane="train", group=group, sample=sample, task_sequence=task, delivery=1, stage="verify", final=True,
            reason="no answer sheet", replica="reward-0",
        )  # fmt: skip
        await world.bus.publish(world.bus.topology.failure(group, sample), encode(failure))
        reason = "raised <script>window.hacked=3</script>"
        await world.bus.dead("reward", b"\xff\x00what", reason, subject=world.bus.topology.trajectory(group, sample))

    async def batch(self, depth: int, members: list[tuple[int, int]], epoch: int = 1) -> None:
        rows = tuple(
            BatchRow(group, sample, self.sequences[group, sample], self.digests[group, sample], sample / 4, 0, 8)
            for group, sample in members
        )
        record = BatchRecord(writer=self.world.stamp(), epoch=epoch, for_depth=depth, rows=rows, at=time.time())
        await self.control(record, "batch")

    async def end(self) -> None:
        await self.control(EndRecord(writer=self.world.stamp(), reason="steps", depth=2), "end")

    async def control(self, record: Any, kind: str) -> int:
        return await self.world.append(record, self.world.bus.topology.control(kind))
