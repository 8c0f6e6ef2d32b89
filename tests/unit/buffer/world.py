"""A run without servers: CONTROL, OUTCOME and the LOG as lists, the real state and decider between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from towline.buffer.decide import decide
from towline.buffer.rules import Rules
from towline.buffer.state import State
from towline.buffer.view import Sources, Unit, View
from towline.contract.codec import digest, encode
from towline.contract.control import BatchRecord, ControlRecord, DropRecord, Record, TaskRecord, decode_control
from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, QuarantineEntry, VersionEntry
from towline.contract.groups import EXTERNAL
from towline.contract.outcome import Failure, FailureStage, Outcome, Score, decode_outcome
from towline.contract.task import SamplingParams, Task, VersionSpan
from towline.environment.prompts import Shuffled
from towline.store.lineage import Lineage

SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(2,))


def rules(**changes: Any) -> Rules:
    values: dict[str, Any] = dict(
        run="world", seed=5, steps=10, group_size=2, groups_per_batch=2, max_staleness=0, max_open_groups=100,
        group_deadline_seconds=100.0, max_attempts=3, keep_off_line=False, sampling=SAMPLING, environment="e:E",
        eval_every=0, eval_prompts=2, eval_samples=1, eval_deadline_seconds=50.0, eval_sampling=SAMPLING,
    )  # fmt: skip
    return Rules(**(values | changes))


def source(name: str = "numbers", length: int = 5, epochs: int | None = None) -> Shuffled:
    return Shuffled(name, length, lambda index: ([index + 3, 1], {"answer": index}), seed=9, epochs=epochs)


@dataclass
class World:
    rules: Rules
    sources: Sources = field(default_factory=lambda: Sources(source(), source("held-out", 3)))
    now: float = 1000.0
    control: list[bytes] = field(default_factory=list)
    outcomes: list[bytes] = field(default_factory=list)
    log: list[LogEntry] = field(default_factory=list)
    state: State = field(default_factory=State)
    lineage: Lineage = field(default_factory=Lineage)
    applied_outcomes: int = 0

    # the LOG

    def entry(self, entry: LogEntry) -> int:
        self.lineage.extend(entry)
        self.log.append(entry)
        return entry.number

    def base(self) -> int:
        return self.entry(
            BaseEntry(number=0, prev=None, write_id="w", at=0.0, source="m", revision=None, anchor="a", layout_digest="l",
                      model_digest="m")
        )  # fmt: skip

    def open(self, base: int | None = None) -> int:
        number = len(self.log)
        base = self.lineage.latest if base is None else base
        return self.entry(
            OpenEntry(number=number, prev="p", write_id=f"w{number}", at=0.0, base=base, base_digest="d",
                      depth=self.lineage.depth(base), batch_cursor=0, checkpoint=None)
        )  # fmt: skip

    def version(self, *, batches: int = 1) -> int:
        """The trainer consumes the epoch's next `batches`, which must stand in CONTROL, and the publisher commits."""
        number, epoch = len(self.log), self.lineage.newest_epoch
        assert epoch is not None
        head = self.lineage.epoch_head(epoch)
        depth = self.lineage.depth(head) + batches
        assert all(self.state.batches[d].epoch <= epoch for d in range(max(depth - batches, self.state.floor_depth), depth))
        return self.entry(
            VersionEntry(number=number, prev="p", write_id=f"w{number}", at=0.0, epoch=epoch, base=head, base_digest="d",
                         depth=depth, skipped=(), representation="delta", codec="xor", folder="f", manifest_digest="m",
                         layout_digest="l", model_digest="m", density=0.1, wire_bytes=1, model_bytes=1, step=depth,
                         batch_cursor=0, checkpoint=None, probe=None, encode_seconds=0, upload_seconds=0, verify_seconds=0)
        )  # fmt: skip

    def quarantine(self, version: int) -> int:
        return self.entry(QuarantineEntry(number=len(self.log), prev="p", write_id="q", at=0.0, version=version, reason="r"))

    # the buffer

    @property
    def view(self) -> View:
        return View(self.state, self.lineage, self.rules, self.sources, self.now)

    def append(self, record: ControlRecord) -> None:
        """To CONTROL and into the state, through its bytes."""
        data = encode(replace(record, writer=f"w/{len(self.control)}"))
        self.control.append(data)
        self.state.apply(decode_control(data), len(self.control))

    def step(self) -> list[Record]:
        """One answer of the decider, appended."""
        records = [record for unit in decide(self.view) for record in unit]
        for record in records:
            self.append(record)
        return records

    def settle(self) -> list[Record]:
        """Until there is nothing to decide."""
        done: list[Record] = []
        for _ in range(1000):
            records = self.step()
            if not records:
                return done
            done.extend(records)
        raise AssertionError("the decider never comes to rest")

    def restart(self) -> None:
        """kill -9: a new process reads CONTROL to its end, then OUTCOME."""
        self.state = self.rebuilt()
        self.applied_outcomes = len(self.outcomes)

    def rebuilt(self, *, outcomes: int | None = None) -> State:
        state = State()
        for sequence, data in enumerate(self.control, start=1):
            state.apply(decode_control(data), sequence)
        for sequence, data in enumerate(self.outcomes[:outcomes], start=1):
            state.apply_outcome(decode_outcome(data), sequence)
        return state

    # workers and reward

    def outcome(self, outcome: Outcome) -> None:
        self.outcomes.append(encode(outcome))
        self.read_outcomes()

    def read_outcomes(self) -> None:
        while self.applied_outcomes < len(self.outcomes):
            self.applied_outcomes += 1
            self.state.apply_outcome(decode_outcome(self.outcomes[self.applied_outcomes - 1]), self.applied_outcomes)

    def score(self, group: int, sample: int, version: int | None = None, *, reward: float = 1.0, **changes: Any) -> Score:
        version = self.lineage.latest if version is None else version
        spans = changes.pop("spans", (VersionSpan(2, 4, version, "start"),))
        task_sequence = changes.pop("task_sequence", None)
        if task_sequence is None:
            task_sequence = self.task_sequence(group, sample)
        name = f"{group}.{sample}".encode()
        tokens = sum(span.end - span.start for span in spans)
        return Score(
            run="world", lane=changes.pop("lane", "train"), group=group, sample=sample, group_size=changes.pop("group_size", 2),
            task_sequence=task_sequence, trajectory_sequence=len(self.outcomes) + 1, trajectory_digest=digest(name),
            reward=reward, verifier="v", policy_tokens=tokens, total_tokens=2 + tokens, version_spans=spans, finish="stop",
            **changes,
        )  # fmt: skip

    def offer(self, group: int, *samples: int, size: int = 2, version: int | None = None, **changes: Any) -> None:
        """Scores of samples that somebody outside made; all of the group where none are named."""
        for sample in samples or range(size):
            self.outcome(self.score(group, sample, version, lane=EXTERNAL, group_size=size, task_sequence=0, **changes))

    def scored(self, *groups: int, version: int | None = None, reward: float = 1.0) -> None:
        """Every sample of these groups that lacks a score gets one."""
        for number in groups:
            group = self.state.groups[number]
            for index, sample in enumerate(group.samples):
                if sample is not None and sample.scored is None:
                    served = group.version if group.version is not None else version
                    self.outcome(self.score(number, index, served, lane=group.lane, reward=reward))

    def failed(
        self, group: int, sample: int, stage: FailureStage = "generate", *, final: bool = False, delivery: int = 1,
        task_sequence: int | None = None, lane: str = "train",
    ) -> None:  # fmt: skip
        task_sequence = self.task_sequence(group, sample) if task_sequence is None else task_sequence
        self.outcome(
            Failure(run="world", lane=lane, group=group, sample=sample, delivery=delivery, stage=stage, final=final,
                    task_sequence=task_sequence, reason="r", replica="w")
        )  # fmt: skip

    def task_sequence(self, group: int, sample: int) -> int:
        found = self.state.groups[group].samples[sample]
        assert found is not None
        return found.task_sequence

    # what stands

    def records(self) -> list[Record]:
        return [decode_control(data) for data in self.control]

    def tasks(self) -> list[Task]:
        return [record.task for record in self.records() if isinstance(record, TaskRecord)]

    def batches(self) -> list[BatchRecord]:
        return [record for record in self.records() if isinstance(record, BatchRecord)]

    def drops(self) -> list[tuple[int, str]]:
        return [(record.group, record.reason) for record in self.records() if isinstance(record, DropRecord)]

    def open_groups(self) -> list[int]:
        return sorted(self.state.open_train)


def kinds(records: Sequence[ControlRecord]) -> list[str]:
    return [type(record).__name__.removesuffix("Record").lower() for record in records]


def started(**changes: Any) -> World:
    """A world whose trainer has opened its first epoch, and whose buffer has come to rest."""
    world = World(rules(**changes))
    world.base()
    world.open()
    world.settle()
    return world


def only(records: Sequence[ControlRecord], kind: type[Any], test: Callable[[Any], bool] = lambda record: True) -> list[Any]:
    return [record for record in records if isinstance(record, kind) and test(record)]


def units_of(world: World) -> list[Unit]:
    return decide(world.view)
