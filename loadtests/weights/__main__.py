"""Weight deltas on real optimiser steps: bytes and speed of every mode against others' ways and against one memcpy.

    python -m loadtests.weights [--data DIR] [--cache DIR] [--json FILE] [--check]

Run it with both cores idle: each figure is the best of some runs, and all speeds are ratios to copying the model once with
one thread in this same run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from loadtests.weights.rivals import best_of, entropy_bound, full_zstd, xor_zstd
from loadtests.weights.snapshots import snapshots

from towline.delta.codec import MODES, apply, encode
from towline.delta.state import ModelState, copy_state, layout_of
from towline.errors import TowlineError

CHECKOUT = Path(__file__).resolve().parents[2]
BYTE_TARGETS = {
    ("1e-06", "default"): 545_000,
    ("1e-05", "default"): 3_020_000,
    ("1e-06", "dense"): 360_000,
    ("1e-05", "dense"): 2_020_000,
}
SPEED_TARGETS = {"1e-06": (0.6, 1.0), "1e-05": (0.45, 0.65)}
"""Learning rate -> (encode + checksum, apply + verify), in memcpys of the model, default mode, two threads."""


class PeakMemory:
    """The most resident bytes above the start, sampled every millisecond."""

    def __enter__(self) -> PeakMemory:
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.bytes = max(self.bytes, self._process.memory_info().rss - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(lr: str, base: ModelState, new: ModelState, runs: int) -> list[dict[str, Any]]:
    """One row per way of sending `new`."""
    model_bytes = sum(tensor.spec.nbytes for tensor in new.values())
    bound = entropy_bound(base, new)
    source = np.concatenate([tensor.data for tensor in new.values()])
    target = source.copy()
    memcpy = best_of(2 * runs, lambda: np.copyto(target, source))
    rows = []
    for mode in [*MODES, "full"]:
        for threads in (1, 2):
            row = _towline(mode, threads, base, new, runs)
            memcpy = min(memcpy, best_of(runs, lambda: np.copyto(target, source)))
            rows.append({"lr": lr, "way": f"towline {mode}", "threads": threads, **row})
    for name, rival in (("XOR + zstd-1", xor_zstd), ("full + zstd-1", full_zstd)):
        size, seconds = min((rival(base, new) for _ in range(max(2, runs // 2))), key=lambda result: result[1])
        rows.append({"lr": lr, "way": name, "threads": 1, "bytes": size, "encode_seconds": seconds})
    for row in rows:
        row["ratio"] = model_bytes / row["bytes"]
        row["of_bound"] = row["bytes"] / bound
        row["memcpy_seconds"] = memcpy
        for what in ("encode", "apply"):
            if f"{what}_seconds" in row:
                row[f"{what}_memcpys"] = memcpy / row[f"{what}_seconds"]
    return rows


def _towline(mode: str, threads: int, base: ModelState, new: ModelState, runs: int) -> dict[str, Any]:
    before = None if mode == "full" else base
    layout = layout_of(new)

    def run() -> tuple[list[bytes], Any]:
        encoding = encode(before, new, mode="default" if mode == "full" else mode, threads=threads)
        return [part.data for part in encoding], encoding.report

    with PeakMemory() as encode_peak:
        parts, report = run()
    encode_seconds = best_of(runs, run)
    state = copy_state(base)
    times = []
    with PeakMemory() as apply_peak:
        apply(state, parts, layout=layout, digests=report.digests, threads=threads)
    for _ in range(runs):
        for name, tensor in state.items():
            tensor.data[:] = base[name].data
        began = time.perf_counter()
        apply(state, parts, layout=layout, digests=report.digests, threads=threads)
        times.append(time.perf_counter() - began)
    if any(state[name].data.tobytes() != tensor.data.tobytes() for name, tensor in new.items()):
        raise AssertionError(f"mode {mode} gave another model")
    return {
        "bytes": report.wire_bytes,
        "density": report.density,
        "codec": report.codec,
        "encode_seconds": encode_seconds,
        "apply_seconds": min(times),
        "encode_peak_bytes": encode_peak.bytes,
        "apply_peak_bytes": apply_peak.bytes,
    }


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each target with what was measured."""
    out = []
    for row in rows:
        lr, mode = row["lr"], row["way"].removeprefix("towline ")
        if row["way"] == "towline full" and row["threads"] == 1:
            rival = next(r for r in rows if r["way"] == "full + zstd-1" and r["lr"] == lr)
            seconds, target = round(row["encode_seconds"], 3), round(rival["encode_seconds"], 3)
            out.append({"what": f"{lr} full: seconds, zstd-1's", "measured": seconds, "target": target, "met": seconds <= target})
        if row["threads"] != 2:
            continue
        if (lr, mode) in BYTE_TARGETS:
            target = BYTE_TARGETS[lr, mode]
            out.append({"what": f"{lr} {mode}: bytes", "measured": row["bytes"], "target": target, "met": row["bytes"] <= target})
        if mode == "default":
            for what, target in zip(("encode", "apply"), SPEED_TARGETS[lr], strict=True):
                speed = row[f"{what}_memcpys"]
                out.append(
                    {"what": f"{lr} {what}: memcpys", "measured": round(speed, 3), "target": target, "met": speed >= target}
                )
    return out


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'lr':<6} {'way':<20} {'thr':>3} {'bytes':>12} {'ratio':>7} {'/bound':>7} {'encode':>16} {'apply':>16} {'peak MiB':>10}"
    )
    for row in rows:
        cells = []
        for what in ("encode", "apply"):
            seconds, speed = row.get(f"{what}_seconds"), row.get(f"{what}_memcpys")
            cells.append(f"{seconds * 1e3:8.1f}ms {speed:4.2f}x" if seconds else "")
        peak = f"{row['encode_peak_bytes'] >> 20:4d} {row['apply_peak_bytes'] >> 20:4d}" if "encode_peak_bytes" in row else ""
        print(
            f"{row['lr']:<6} {row['way']:<20} {row['threads']:>3} {row['bytes']:>12,} {row['ratio']:>7.1f} "
            f"{row['of_bound']:>7.3f} "
            f"{cells[0]:>16} {cells[1]:>16} {peak:>10}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.weights", description=__doc__.split("\n")[0])
    default_data = os.environ.get("TOWLINE_UPDATES", str(CHECKOUT.parent / "shared/data/smollm2_updates"))
    default_cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    parser.add_argument("--data", type=Path, default=Path(default_data), help="the recorded updates (or TOWLINE_UPDATES)")
    parser.add_argument(
        "--cache", type=Path, default=Path(default_cache) / "towline/smollm2", help="where rebuilt snapshots stay (2 GB)"
    )
    parser.add_argument("--lr", action="append", choices=sorted(SPEED_TARGETS), help="only this learning rate")
    parser.add_argument("--runs", type=int, default=7, help="runs of which the best counts")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        for lr in options.lr or ("1e-06", "1e-05"):
            states = snapshots(options.data, options.cache, f"lr{lr}")
            rows += measure(lr, copy_state(states["s07"]), copy_state(states["s08"]), options.runs)
    except TowlineError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return error.exit_status
    print_table(rows)
    results = verdicts(rows)
    print(f"\nmemcpy of the model: {min(row['memcpy_seconds'] for row in rows) * 1e3:.1f} ms")
    for verdict in results:
        mark = "met   " if verdict["met"] else "MISSED"
        print(f"{mark} {verdict['what']:<32} {verdict['measured']:>12,} target {verdict['target']:,}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "targets": results}, indent=1))
    return 1 if options.check and not all(verdict["met"] for verdict in results) else 0


if __name__ == "__main__":
    sys.exit(main())
