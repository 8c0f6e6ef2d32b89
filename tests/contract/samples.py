"""One message of each kind, all fields set, for golden files and refusal tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np

from towline.contract import control, entries, outcome, policy, requests
from towline.contract.partial import Partial, prompt_digest
from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, VersionSpan, pack_tokens
from towline.contract.trajectory import Segment, Timings, Trajectory

DIGEST = bytes(range(16))
SAMPLING = SamplingParams(max_tokens=4, temperature=0.5, top_p=0.9, top_k=20, stop_token_ids=(2,))
TASK = Task(
    run="golden", lane="train", group=7, sample=1, group_size=2, prompt=pack_tokens([5, 6, 7]),
    prompt_ref=PromptRef("sort", 0, 3), cursor=Cursor(0, 4), reference={"answer": "12"}, sampling=SAMPLING, seed=99,
    not_before_depth=3, exact_version=None, attempt=1, admitted_at=1000.5, deadline=1600.5,
)  # fmt: skip


def trajectory(**changes: Any) -> Trajectory:
    """Three prompt tokens, two policy tokens of version 4, one tool token, one policy token of version 5."""
    nan = np.nan
    values: dict[str, Any] = dict(
        run="golden", lane="train", group=7, sample=1, group_size=2, task_sequence=11, attempt=1,
        prompt_ref=PromptRef("sort", 0, 3), reference={"answer": "12"},
        tokens=np.array([5, 6, 7, 8, 9, 10, 2], np.int32), loss_mask=np.array([0, 0, 0, 1, 1, 0, 1], np.uint8),
        logprobs=np.array([nan, nan, nan, -0.25, -1.5, nan, -2.0], np.float32),
        version_spans=(VersionSpan(3, 5, 4, "start"), VersionSpan(6, 7, 5, "retract")),
        segments=(Segment(0, 3, "prompt"), Segment(3, 5, "policy"), Segment(5, 6, "tool"), Segment(6, 7, "policy")),
        finish="stop", sampling=SAMPLING, seed=99, engine="torch", replica="worker-0",
        timings=Timings(pulled_at=1001.0, finished_at=1002.0, queue_seconds=0.25, generate_seconds=0.5),
    )  # fmt: skip
    return Trajectory(**(values | changes))


def partial(**changes: Any) -> Partial:
    """What `trajectory()` was after its tool answered and its policy had chosen one more token."""
    whole = trajectory()
    values: dict[str, Any] = dict(
        run="golden", group=7, sample=1, task_sequence=11, delivery=2, starts=1, prompt_digest=prompt_digest(TASK),
        environment=TASK.environment, sampling=SAMPLING, seed=99, tokens=whole.tokens, logprobs=whole.logprobs,
        version_spans=whole.version_spans, segments=whole.segments, turn="stop", environment_state=b"\x01state",
        engine="torch", replica="worker-0", at=1002.0, queue_seconds=0.25, generate_seconds=0.5,
    )  # fmt: skip
    return Partial(**(values | changes))


def wire(trajectory_bytes: bytes) -> dict[str, Any]:
    """A trajectory's message as a plain dictionary, to be spoiled."""
    return msgspec.msgpack.decode(trajectory_bytes)


def repack(tree: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(tree)


def same(left: Trajectory | Partial, right: Trajectory | Partial) -> bool:
    """Equal bit for bit, NaNs included."""
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True


SPANS = (VersionSpan(3, 5, 4, "start"), VersionSpan(6, 7, 5, "retract"))
OUTCOMES: dict[str, outcome.Outcome] = {
    "score": outcome.Score(
        run="golden", lane="train", group=7, sample=1, group_size=2, task_sequence=11, trajectory_sequence=21,
        trajectory_digest=DIGEST, reward=0.75, components={"order": 0.5}, verifier="sort:reward", policy_tokens=3,
        total_tokens=7, version_spans=SPANS, finish="stop",
    ),
    "failure": outcome.Failure(
        run="golden", lane="train", group=7, sample=1, task_sequence=11, delivery=2, stage="generate", final=True,
        reason="out of memory", replica="worker-0",
    ),
}  # fmt: skip
CONTROL: dict[str, control.Record] = {
    "writer": control.WriterRecord(writer="b1/0", at=1000.0),
    "task": control.TaskRecord(writer="b1/1", task=TASK),
    "reissue": control.ReissueRecord(writer="b1/2", task=TASK, reason="generate"),
    "batch": control.BatchRecord(
        writer="b1/3", epoch=1, for_depth=4, rows=(control.BatchRow(7, 1, 21, DIGEST, 0.75, 3, 3),), at=1003.0
    ),
    "drop": control.DropRecord(writer="b1/4", lane="train", group=8, samples=2, reason="stale"),
    "cancel": control.CancelRecord(writer="b1/5", group=8, sample=0, task_sequence=12, reason="stale"),
    "admit": control.AdmitRecord(writer="b1/6", lane="external", group=9, sample=0, group_size=1),
    "eval": control.EvalRecord(
        writer="b1/7", version=4, depth=3, wanted=2, rows=(control.EvalRow(10, 0, 22, DIGEST, 1.0),), mean=1.0
    ),
    "fork": control.ForkRecord(writer="b1/8", epoch=6, base=4, depth=3),
    "batch+over_stale": control.BatchRecord(
        writer="b1/11",
        epoch=1,
        for_depth=4,
        rows=(control.BatchRow(7, 1, 21, DIGEST, 0.75, 1, 3),),
        at=1003.0,
        over_stale=control.OverStale(mode="mask", max_staleness=2, rows=(control.OverStaleRow(0, 2),)),
    ),
    "drop+offered": control.DropRecord(writer="b1/12", lane="external", group=-17, samples=0, reason="unpaced", offered=3),
    "requeue": control.RequeueRecord(writer="b1/13", dead=5, group=8, task=TASK),
    "admit+external": control.AdmitRecord(writer="b1/14", lane="external", group=-17, sample=1, group_size=2),
    "snapshot": control.SnapshotRecord(writer="b1/9", blob=DIGEST, covers=30, outcome_cursor=15),
    "end": control.EndRecord(writer="b1/10", reason="steps", depth=5),
}
REQUEST = requests.RequeueRequest(run="golden", dead=5, task_sequence=11, drop_sequence=19)
POLICY: dict[str, policy.PolicyMessage] = {
    "opened": policy.Opened(epoch=1),
    "staged": policy.Staged(epoch=1, base=0, write_id="w", folder="golden/versions/1-0-w", manifest_digest="ab"),
    "committed": policy.Committed(number=2, epoch=1, write_id="w"),
    "refused": policy.Refused(epoch=1, write_id="w", reason="base"),
}
PROBE = entries.Probe(tokens=(1, 5, 6), logprobs=(-1.5, -0.25), tolerance=1e-3)
ENTRIES: dict[str, entries.LogEntry] = {
    "base": entries.BaseEntry(
        number=0, prev=None, write_id="w0", at=1000.0, source="model", revision=None, anchor="golden/anchors/00000000/w0",
        layout_digest="aa", model_digest="bb", probe=PROBE,
    ),
    "open": entries.OpenEntry(
        number=1, prev="cc", write_id="w1", at=1001.0, base=0, base_digest="cc", depth=0, batch_cursor=0, checkpoint=None
    ),
    "version": entries.VersionEntry(
        number=2, prev="dd", write_id="w2", at=1002.0, epoch=1, base=0, base_digest="cc", depth=1, skipped=(0,),
        representation="delta", codec="xor", folder="golden/versions/1-0-w2", manifest_digest="ee", layout_digest="aa",
        model_digest="ff", density=0.25, wire_bytes=100, model_bytes=1000, step=2, batch_cursor=30, checkpoint="c1",
        probe=PROBE, encode_seconds=0.5, upload_seconds=0.25, verify_seconds=0.125, missing_rows=1,
    ),
    "quarantine": entries.QuarantineEntry(number=3, prev="ff", write_id="w3", at=1003.0, version=2, reason="probe"),
}  # fmt: skip
