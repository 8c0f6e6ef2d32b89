"""A run's lives written by hand, so that every figure of its load test is known."""

from __future__ import annotations

from pathlib import Path

from towline.contract.entries import VersionEntry
from towline.contract.policy import Ack, Served
from towline.loadtest.collect import Life, Lives, Trained
from towline.loadtest.figures import fill
from towline.loadtest.result import Result, new_result
from towline.loadtest.scenario import load_scenario
from towline.loadtest.watch import Looks

START = 1000.0


def life(at: float, *, tokens: int = 10, trained: bool = True) -> Life:
    """Pulled 0.1 s after its task, generated for 2 s, durable 0.01 s later, scored 0.02 s later, batched 1 s after that."""
    done = at + 2.1
    return Life(
        task_at=at, attempt=0, pulled_at=at + 0.1, finished_at=done, queue_seconds=0.0, generate_seconds=2.0,
        durable_at=done + 0.01, tokens=tokens, version_start=0, replica="w0", nbytes=100, scored_at=done + 0.03,
        batched_at=done + 1.03 if trained else None, for_depth=0 if trained else None,
    )  # fmt: skip


def version(number: int) -> VersionEntry:
    """Each 10 s; 0.5 s to encode, 0.25 s to upload, 0.125 s to verify."""
    return VersionEntry(
        number=number, prev="p", write_id=f"w{number}", at=START + 10 * number, epoch=1, base=number - 1, base_digest="b",
        depth=number, skipped=(), representation="delta", codec="bits", folder="f", manifest_digest="m", layout_digest="l",
        model_digest="d", density=0.25, wire_bytes=100, model_bytes=1000, step=number, batch_cursor=number, checkpoint=None,
        probe=None, encode_seconds=0.5, upload_seconds=0.25, verify_seconds=0.125,
    )  # fmt: skip


def ack(replica: str, seconds: float) -> Ack:
    """Of a replica that served every version so many seconds after its entry."""
    history = tuple(
        Served(version=number, depth=number, published_at=START + 10 * number, at=START + 10 * number + seconds)
        for number in range(1, 10)
    )
    return Ack(
        replica=replica, version=9, files_digest="f", engine_digest=None, probe_max_abs_diff=None, probe_tolerance=None,
        prepare_seconds=0.1, pause_seconds=0.01, wire_bytes=100, mode="drain", at=START + 90, history=history,
    )  # fmt: skip


def written(tmp_path: Path, text: str = "") -> Result:
    """A sample a second for 100 s, every tenth (ten times as long) dropped as stale; batches each 10 s, 4 of them idle; two
    replicas, the one serving a version 1 s after its entry, the other 3 s. `text`: more of the scenario's table [load]."""
    path = tmp_path / "s.toml"
    path.write_text(f"[load]\nwarm_up_seconds = 10\n{text}")
    found = Lives(began_at=START)
    for second in range(100):
        long = second % 10 == 9
        found.lives[second] = life(START + second, tokens=100 if long else 10, trained=not long)
        found.admitted.append(START + second)
    found.drops["stale"] = 10
    found.batches = [Trained(number, START + 10 * number, [0, 1, 2], [5.0], 90, 9) for number in range(10)]
    found.versions = [version(number) for number in range(1, 10)]
    found.acks = [ack("w0", 1.0), ack("w1", 3.0)]
    looks = Looks(rows=[
        {"at": START + 2 * step, "trainer.idle_seconds": 0.8 * step, "trainer.train_seconds": 1.2 * step, "rss.buffer": 100e6,
         "rss.reward": 100e6 * (1 + step / 50), "workers.busy": 3.0, "workers.slots": 4.0, "tasks.waiting": 7.0}
        for step in range(51)
    ])  # fmt: skip
    looks.timings = {"ttft": [0.1, 0.2], "itl": [0.01, 0.02], "tpot": [0.015]}
    result = new_result(load_scenario(path))
    fill(result, found, looks, max_staleness=2)
    return result
