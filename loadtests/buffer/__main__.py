"""The buffer under load: python -m loadtests.buffer [--groups N] [--group-size N] [--nats FOLDER]; prints one JSON object.

samples_per_second      outcome bytes to batch record, decoding included, on one core (target: 5,000)
open_megabytes          resident memory that N open groups take, half of the samples scored (target: under 500 for 100,000)
replay_seconds          those groups' state from their records' bytes, in memory
snapshot_*              the same state as a snapshot: size, time to write, time to read
rebuild_seconds         the same from a real nats-server: every record of CONTROL and every score of OUTCOME (target: under 30)
rebuild_cpu_seconds     of this process: what it takes where nothing else wants the core
read_cpu_seconds        of those, reading the two streams; the rest is decoding and applying
rebuild_snapshot_seconds   and from a snapshot that covers CONTROL, and OUTCOME
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
from msgspec.structs import replace

from towline.buffer.decide import decide
from towline.buffer.dump import decode_state, encode_state
from towline.buffer.replay import read_outcomes, rebuild
from towline.buffer.rules import Rules
from towline.buffer.state import State
from towline.buffer.view import Sources, View
from towline.bus.client import Bus
from towline.bus.control_log import ControlLog
from towline.bus.topology import CONTROL, MAX_ATOMIC_MESSAGES, OUTCOME, Topology
from towline.config import BusSettings, StoreSettings
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, Record, SnapshotRecord, decode_control
from towline.contract.entries import BaseEntry, OpenEntry, VersionEntry
from towline.contract.outcome import Score, decode_outcome
from towline.contract.task import SamplingParams, VersionSpan
from towline.environment.prompts import Shuffled
from towline.local.servers import NatsServer
from towline.store.blobs import Blobs
from towline.store.lineage import Lineage
from towline.store.objects import open_store

PROMPT_TOKENS = 128
BATCHES, GROUPS_PER_BATCH = 40, 64
NOW = 1_000_000.0


class Run:
    """Streams as counters, the real state and decider between them."""

    def __init__(self, group_size: int, groups_per_batch: int, staleness: int, steps: int) -> None:
        sampling = SamplingParams(max_tokens=1024, stop_token_ids=(2,))
        self.rules = Rules(
            run="load", seed=1, steps=steps, group_size=group_size, groups_per_batch=groups_per_batch, max_staleness=staleness,
            max_open_groups=10**9, group_deadline_seconds=600.0, max_attempts=8, keep_off_line=False, sampling=sampling,
            environment="towline.environment.single_turn:SingleTurn", eval_every=0, eval_prompts=1, eval_samples=1,
            eval_deadline_seconds=60.0, eval_sampling=sampling,
        )  # fmt: skip
        source = Shuffled("load", 10_000, lambda i: (range(i, i + PROMPT_TOKENS), {"answer": str(i)}), seed=1)
        self.sources = Sources(source, source)
        self.state, self.lineage, self.sequence, self.outcomes = State(), Lineage(), 0, 0
        plain: dict[str, Any] = dict(prev=None, write_id="w", at=0.0)
        self.lineage.extend(
            BaseEntry(number=0, source="m", revision=None, anchor="a", layout_digest="l", model_digest="m", **plain)
        )
        self.lineage.extend(OpenEntry(number=1, base=0, base_digest="d", depth=0, batch_cursor=0, checkpoint=None, **plain))

    @property
    def view(self) -> View:
        return View(self.state, self.lineage, self.rules, self.sources, NOW)

    def settle(self) -> list[Record]:
        """Decide and apply until there's nothing to decide."""
        done: list[Record] = []
        while units := decide(self.view):
            for record in (record for unit in units for record in unit):
                self.sequence += 1
                self.state.apply(record, self.sequence)
                done.append(record)
        return done

    def commit(self) -> None:
        """The trainer has consumed the epoch's next batch."""
        number, head = self.lineage.next_number, self.lineage.latest
        self.lineage.extend(VersionEntry(
            number=number, prev="p", write_id=f"w{number}", at=0.0, epoch=1, base=head, base_digest="d",
            depth=self.lineage.depth(head) + 1, skipped=(), representation="delta", codec="c", folder="f", manifest_digest="m",
            layout_digest="l", model_digest="m", density=0.1, wire_bytes=1, model_bytes=1, step=1, batch_cursor=0,
            checkpoint=None, probe=None, encode_seconds=0, upload_seconds=0, verify_seconds=0))  # fmt: skip

    def score(self, group: int, sample: int) -> bytes:
        name = f"{group}.{sample}".encode()
        found = self.state.groups[group].samples[sample]
        assert found is not None
        latest = self.lineage.latest
        return encode(Score(
            run="load", lane="train", group=group, sample=sample, group_size=self.rules.group_size,
            task_sequence=found.task_sequence, trajectory_sequence=self.outcomes + 1, trajectory_digest=digest(name),
            reward=float(sample % 2), verifier="v", policy_tokens=500, total_tokens=500 + PROMPT_TOKENS, finish="stop",
            version_spans=(VersionSpan(PROMPT_TOKENS, PROMPT_TOKENS + 500, latest, "start"),)))  # fmt: skip

    def take(self, data: bytes) -> None:
        self.outcomes += 1
        self.state.apply_outcome(decode_outcome(data), self.outcomes)


def throughput(group_size: int) -> dict[str, float]:
    """Outcomes arrive, batches and new tasks come out, versions are committed."""
    run = Run(group_size, GROUPS_PER_BATCH, 1, BATCHES)
    run.settle()
    samples, batches, spent = 0, 0, 0.0
    while run.view.depth < BATCHES:
        waiting = [n for n in run.state.open_train if n not in run.state.complete]
        arrived = [run.score(n, i) for n in waiting for i in range(group_size)]
        samples += len(arrived)
        begun = time.process_time()
        for data in arrived:
            run.take(data)
        batches += sum(isinstance(record, BatchRecord) for record in run.settle())
        spent += time.process_time() - begun
        run.commit()
    assert batches == BATCHES
    return {"samples": samples, "batches": batches, "samples_per_second": round(samples / spent)}


class Written(msgspec.Struct):
    """A run's CONTROL and OUTCOME, as bytes."""

    records: list[tuple[str, bytes]]
    scores: list[bytes]


def write(groups: int, group_size: int, path: Path) -> None:
    """N groups are open at once, half of the samples scored: in a process of its own, whose memory nobody measures."""
    run, topology = Run(group_size, groups, 0, 10), Topology("load")
    records = [(subject(record, topology), encode(replace(record, writer="w/1"))) for record in run.settle()]
    scores = [run.score(number, index) for number in run.state.open_train for index in range(0, group_size, 2)]
    path.write_bytes(encode(Written(records, scores)))


def memory(groups: int, group_size: int) -> tuple[dict[str, float], Run, Written]:
    """The written streams, replayed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        arguments = ["--groups", str(groups), "--group-size", str(group_size), "--write", str(path)]
        subprocess.run([sys.executable, "-m", "loadtests.buffer", *arguments], check=True, timeout=600)
        written = msgspec.msgpack.decode(path.read_bytes(), type=Written)
    run = Run(group_size, groups, 0, 10)
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    begun = time.process_time()
    for sequence, (_, data) in enumerate(written.records, start=1):
        run.state.apply(decode_control(data), sequence)
    for data in written.scores:
        run.take(data)
    replay = time.process_time() - begun
    assert len(run.state.open_train) == groups
    gc.collect()
    used = process.memory_info().rss - before
    begun = time.process_time()
    snapshot = encode_state(run.state)
    wrote = time.process_time() - begun
    begun = time.process_time()
    decode_state(snapshot)
    return {
        "groups": groups, "group_size": group_size, "open_megabytes": round(used / 1e6), "replay_seconds": round(replay, 2),
        "snapshot_megabytes": round(len(snapshot) / 1e6), "snapshot_write_seconds": round(wrote, 2),
        "snapshot_read_seconds": round(time.process_time() - begun, 2),
    }, run, written  # fmt: skip


def subject(record: Record, topology: Topology) -> str:
    from towline.buffer.records import subject_of

    return subject_of(record, topology)


async def from_nats(folder: Path, written: Written, run: Run) -> dict[str, float]:
    """Append everything, rebuild from the whole stream, then again with a snapshot."""
    name, records = f"load-{secrets.token_hex(3)}", written.records
    server = NatsServer(folder / "nats", max_store_bytes=8 << 30)
    await asyncio.to_thread(server.start)
    blobs = Blobs(open_store(StoreSettings(url=(folder / "store").as_uri())), name)
    bus = await Bus.connect(server.settings(BusSettings(budget_bytes=6 << 30)), run=name, client_name="load", blobs=blobs)
    try:
        await bus.ensure()
        pen = ControlLog(bus, "w")
        begun = time.monotonic()
        await pen.append([(f"towline.{name}.{old.partition('.load.')[2]}", data) for old, data in records])
        append = time.monotonic() - begun
        await publish_scores(bus, written.scores)
        used = time.process_time()
        count = 0
        for spec in (CONTROL, OUTCOME):
            async for _ in bus.read(spec, follow=False):
                count += 1
        assert count == len(records) + len(written.scores)
        read = time.process_time() - used
        begun, used = time.monotonic(), time.process_time()
        state = await rebuild(bus, blobs)
        await read_outcomes(bus, state)
        whole, cpu = time.monotonic() - begun, time.process_time() - used
        assert len(state.open_train) == len(run.state.open_train)
        assert state.scored_samples == len(written.scores)
        record = SnapshotRecord(
            writer="w/2",
            blob=blobs.put(encode_state(state)),
            covers=state.control_sequence,
            outcome_cursor=state.outcome_sequence,
        )
        await pen.append([(bus.topology.control("snapshot"), encode(record))])
        begun = time.monotonic()
        again = await rebuild(bus, blobs)
        await read_outcomes(bus, again)
        assert len(again.open_train) == len(state.open_train)
        return {
            "append_per_second": round(len(records) / append), "rebuild_seconds": round(whole, 2),
            "rebuild_cpu_seconds": round(cpu, 2), "read_cpu_seconds": round(read, 2),
            "rebuild_snapshot_seconds": round(time.monotonic() - begun, 2),
        }  # fmt: skip
    finally:
        await bus.close()
        await asyncio.to_thread(server.stop)


async def publish_scores(bus: Bus, scores: list[bytes]) -> None:
    """As reward does for a group verifier: atomic batches, each score create-only."""
    for start in range(0, len(scores), MAX_ATOMIC_MESSAGES):
        part = [(decode_outcome(data), data) for data in scores[start : start + MAX_ATOMIC_MESSAGES]]
        await bus.create_all([(bus.topology.score(score.group, score.sample), data) for score, data in part])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--nats", type=Path, help="also rebuild from a real nats-server that keeps its data in this folder")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write(given.groups, given.group_size, given.write)
        return
    found: dict[str, float] = throughput(given.group_size)
    held, run, written = memory(given.groups, given.group_size)
    found |= held
    if given.nats is not None:
        found |= uvloop.run(from_nats(given.nats, written, run))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
