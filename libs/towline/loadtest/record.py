"""A run's samples as a recording (`towline.engine.recording`): of its streams, a bundle, or a file of `towline replay --to`.

What is told by the run's own records, and how: prompt and turns by the segments; speed by tokens and the engine's seconds; a
sample's tools together have what is left between pull and end (a worker's waiting for a version is in it too), and nothing where
it had one turn; failures by their records. Lane train alone.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from towline.bundle.source import Source
from towline.bus.topology import OUTCOME, TRAJECTORY
from towline.contract.outcome import Failure, decode_outcome
from towline.contract.task import TRAIN
from towline.contract.trajectory import decode_trajectory
from towline.engine.recording import Recorded, Recording, Turn
from towline.errors import MalformedError, UsageError

MOST_GROUPS = 4000
"""That are kept: of a longer run so many, drawn at random. A group of 16 takes about 600 bytes."""

FAILURES = ("generate", "environment", "malformed")
"""Stages at which the sample itself failed. What was given up for its version, or with its worker, is the fleet's doing."""


class Recorder:
    """`take` samples and failures; `made` is the whole."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, Recorded]] = {}
        self.failures: Counter[str] = Counter()

    def take(
        self, group: int, sample: int, segments: Sequence[tuple[int, int, str]], finish: Any, *, lasted: float,
        queue_seconds: float | None, generate_seconds: float | None,
    ) -> None:  # fmt: skip
        """A sample that ended. `lasted`: seconds from pull to end; of the engine None where the source doesn't tell."""
        prompt = sum(end - start for start, end, _ in takewhile(lambda segment: segment[2] != "policy", segments))
        turns: list[Turn] = []
        for start, end, kind in segments:
            if kind == "policy":
                turns.append(Turn(end - start))
            elif turns:
                turns[-1] = Turn(turns[-1].policy, turns[-1].environment + end - start)
        if not turns:
            return
        engine = lasted if generate_seconds is None else generate_seconds
        tools = max(lasted - engine - (queue_seconds or 0.0), 0.0) if len(turns) > 1 else 0.0
        speed = sum(turn.policy for turn in turns) / engine if engine > 0 else 0.0
        one = Recorded(prompt, tuple(turns), round(tools, 4), round(speed, 3), finish)
        self._groups.setdefault(group, {})[sample] = one

    def made(self, source: str) -> Recording:
        groups = [[samples[number] for number in sorted(samples)] for _, samples in sorted(self._groups.items())]
        if not groups:
            raise UsageError(f"{source}: no sample of lane train in it", code="recording_empty")
        count = sum(map(len, groups))
        if len(groups) > MOST_GROUPS:
            groups = random.Random(0).sample(groups, MOST_GROUPS)
        return Recording(
            source=source, samples=count, failures=dict(self.failures), group_size=max(map(len, groups)), groups=groups
        )


async def record(source: Source) -> Recording:
    """Of a run or a bundle; reads two of its streams once."""
    recorder = Recorder()
    async with contextlib.aclosing(source.read(TRAJECTORY)) as messages:
        async for message in messages:
            try:
                one = decode_trajectory(message.data)
            except MalformedError:
                continue  # it's the audit's to tell
            if one.lane == TRAIN:
                recorder.take(
                    one.group, one.sample, [(segment.start, segment.end, segment.kind) for segment in one.segments], one.finish,
                    lasted=one.timings.finished_at - one.timings.pulled_at, queue_seconds=one.timings.queue_seconds,
                    generate_seconds=one.timings.generate_seconds,
                )  # fmt: skip
    async with contextlib.aclosing(source.read(OUTCOME)) as messages:
        async for message in messages:
            if isinstance(outcome := decode_outcome(message.data), Failure) and outcome.stage in FAILURES:
                recorder.failures[outcome.stage] += 1
    return recorder.made(source.where)


def record_lines(lines: Iterable[str], source: str) -> Recording:
    """Of what `towline replay --to FILE` wrote; it has no failures. `UsageError` where it's something else."""
    recorder = Recorder()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if row.get("problem") is None and row["lane"] == TRAIN:
                recorder.take(
                    row["group"], row["sample"], row["segments"], row["finish"], lasted=row["finished_at"] - row["pulled_at"],
                    queue_seconds=row.get("queue_seconds"), generate_seconds=row.get("generate_seconds"),
                )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{source}, line {number}: no trajectory ({type(error).__name__}: {error}); give a run, a bundle, a recording or "
                "what `towline replay --to FILE` wrote",
                code="recording",
            ) from None
    return recorder.made(source)


def write_recording(recording: Recording, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(recording))
    temporary.replace(path)
