"""Where replayed trajectories go: the screen, or a file with one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO, Any, Protocol

from towline.bundle.select import Selected
from towline.contract.codec import digest
from towline.contract.groups import group_token
from towline.errors import UsageError
from towline.runtime.terminal import say


class Sink(Protocol):
    """A context manager that takes trajectories."""

    count: int

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def take(self, item: Selected) -> None: ...


class ToFile:
    """`path` appears when everything is in it: whole or not at all. It mustn't exist."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            raise UsageError(f"{path} exists; give another file, or remove it", code="file_exists")
        self.count = 0
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file: IO[str] | None = None

    def __enter__(self) -> ToFile:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._temporary.open("w")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        assert self._file is not None
        self._file.close()
        if kind is None:
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink(missing_ok=True)

    def take(self, item: Selected) -> None:
        assert self._file is not None
        self._file.write(json.dumps(whole(item)) + "\n")
        self.count += 1


class Screen:
    """A line for each; with `as_json` the same object as in a file."""

    def __init__(self, as_json: bool) -> None:
        self.count = 0
        self._as_json = as_json

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None: ...

    def take(self, item: Selected) -> None:
        self.count += 1
        say(json.dumps(whole(item)) if self._as_json else brief(item))


def whole(item: Selected) -> dict[str, Any]:
    """All of a trajectory and its score as plain values; logprobs of tokens that the policy didn't choose are null."""
    row: dict[str, Any] = {
        "sequence": item.message.sequence, "subject": item.message.subject, "at": item.message.at,
        "digest": digest(item.message.data).hex(), "problem": item.problem,
    }  # fmt: skip
    t, score = item.trajectory, item.score
    if t is not None:
        row |= {
            "group": t.group, "sample": t.sample, "group_size": t.group_size, "lane": t.lane, "task_sequence": t.task_sequence,
            "attempt": t.attempt, "prompt": [t.prompt_ref.source, t.prompt_ref.epoch, t.prompt_ref.index],
            "reference": t.reference, "tokens": t.tokens.tolist(), "loss_mask": t.loss_mask.tolist(),
            "logprobs": [None if math.isnan(value) else value for value in t.logprobs.tolist()],
            "version_spans": [[s.start, s.end, s.version, s.cut] for s in t.version_spans],
            "segments": [[s.start, s.end, s.kind] for s in t.segments], "finish": t.finish,
            "temperature": t.sampling.temperature, "seed": t.seed, "engine": t.engine, "replica": t.replica,
            "pulled_at": t.timings.pulled_at, "finished_at": t.timings.finished_at, "queue_seconds": t.timings.queue_seconds,
            "generate_seconds": t.timings.generate_seconds,
        }  # fmt: skip
    if score is not None:
        row |= {"reward": score.reward, "components": score.components, "verifier": score.verifier}
    return row


def brief(item: Selected) -> str:
    """One line for people."""
    t, score = item.trajectory, item.score
    if t is None:
        return f"{item.message.at:.3f}  {item.message.subject}  malformed: {item.problem}"
    reward = "-" if score is None else f"{score.reward:.3f}"
    versions = str(t.version_start) if t.version_start == t.version_end else f"{t.version_start}-{t.version_end}"
    return (
        f"{item.message.at:.3f}  {f'{group_token(t.group)}.{t.sample}':>12}  {t.lane:5}  version {versions:>7}  "
        f"{t.policy_tokens:>6} tokens  {t.finish:8}  reward {reward:>7}  {t.replica}"
    )
