"""092-several-clusters.md's figures for tens of regions, computed anew: records are encoded, transfers played through."""

from __future__ import annotations

import heapq
import re
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from contract import samples
from towline.contract.codec import encode
from towline.contract.control import TaskRecord
from towline.contract.policy import ACK_HISTORY, Ack, ReplicaInfo, Served
from towline.contract.task import VersionSpan, pack_tokens
from towline.contract.trajectory import Segment, encode_trajectory

DESIGN = Path(__file__).parents[3] / "docs" / "design"
PAGE = (DESIGN / "092-several-clusters.md").read_text().split("## On to tens of regions")[1].split("## What falls short")[0]
MODEL, REGIONS, REPLICAS, BATCH, STEP = 2e12, 20, 1000, 4096, 60.0
PROMPT, TOKENS = 1000, 3000
UNITS = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def said(row: str) -> list[float]:
    """All amounts of bytes, or bytes a second, of the table's row or the paragraph that begins so, in order."""
    (line,) = re.findall(rf"^(?:\| |- \*\*){re.escape(row)}.*?(?=\n\||\n- |\n\n)", PAGE, re.M | re.S)
    return [float(number.replace(",", "")) * UNITS[unit] for number, unit in re.findall(r"([\d.,]*\d) ([kMGT]?B)\b", line)]


def near(found: float, *, within: float = 0.06) -> object:
    return pytest.approx(found, rel=within)


def ratio(column: int) -> float:
    """Of 010's table of the default codec."""
    row = next(line for line in (DESIGN / "010-delta-codec.md").read_text().splitlines() if line.startswith("| default |"))
    return float(re.findall(r"([\d.]+)x", row)[column])


@pytest.mark.parametrize(("row", "column"), [("a delta, lr 1e-6", 0), ("a delta, lr 1e-5", 1)])
def test_a_version_goes_out_once_a_region(row: str, column: int) -> None:
    delta = MODEL / ratio(column)
    numbers = said(row)
    assert numbers[:3] == [near(delta), near(delta), near(REGIONS * delta)]
    if column == 0:
        assert numbers[3:] == [near(REPLICAS * delta)]
        assert said("inside a region") == [near(REPLICAS / REGIONS * delta), near(REPLICAS / REGIONS * delta / STEP)]
    else:
        assert numbers[3:] == [near(REGIONS * delta / STEP)]


def test_a_full_version_crosses_rarely() -> None:
    text = (DESIGN / "010-delta-codec.md").read_text()
    (sent,) = re.findall(r"^\| full \| ([\d.]+) MB", text, re.M)
    (whole,) = re.findall(r"bf16 \((\d+) MB\)", text)
    full = MODEL * float(sent) / float(whole)
    assert said("a full version") == [near(full), near(REGIONS * full)]
    assert said("Full versions and anchors")[:2] == [near(full), near(full / (50 * STEP))]


def test_records_are_as_long_as_the_contract_makes_them() -> None:
    length = PROMPT + TOKENS
    random = np.random.default_rng(0)
    tokens = random.integers(0, 150_000, length).astype(np.int32)
    task = replace(samples.TASK, prompt=pack_tokens(tokens[:PROMPT]), run="prod", group=700_000, seed=1 << 62)
    record = len(encode(TaskRecord(writer="0123456789ab/100000", task=task)))
    one = samples.trajectory(
        tokens=tokens, loss_mask=np.r_[np.zeros(PROMPT, np.uint8), np.ones(TOKENS, np.uint8)],
        logprobs=np.r_[np.full(PROMPT, np.nan, np.float32), -random.exponential(0.5, TOKENS).astype(np.float32)],
        segments=(Segment(0, PROMPT, "prompt"), Segment(PROMPT, length, "policy")),
        version_spans=(VersionSpan(PROMPT, length, 9_000, "start"),),
    )  # fmt: skip
    sample = len(encode_trajectory(one))
    entry = len(
        encode(
            ReplicaInfo(
                replica="rollout-worker-7f9c4d-x2x4z",
                host="rollout-worker-7f9c4d-x2x4z",
                engine="sglang",
                slots=64,
                busy=64,
                state="serving",
                version=70_000,
                at=1.8e9,
                site="region-17",
            )
        )
    )
    served = Served(version=70_000, depth=70_000, published_at=1.8e9 + 0.1, at=1.8e9 + 0.2)
    ack = len(
        encode(
            Ack(
                replica="rollout-worker-7f9c4d-x2x4z",
                version=70_000,
                files_digest="0" * 32,
                engine_digest="0" * 32,
                probe_max_abs_diff=0.001,
                probe_tolerance=0.01,
                prepare_seconds=1.5,
                pause_seconds=0.5,
                wire_bytes=int(4e9),
                mode="in_place",
                at=1.8e9 + 0.3,
                history=(served,) * ACK_HISTORY,
            )
        )
    )
    tasks, all_samples = BATCH * record, BATCH * sample
    assert said("tasks (") == [
        near(record, within=0.1), near(tasks, within=0.1), near(tasks, within=0.1), near(REGIONS * tasks, within=0.1),
        near(REGIONS * tasks / STEP, within=0.1),
    ]  # fmt: skip
    assert said("trajectories (") == [
        near(sample, within=0.1), near(all_samples, within=0.1), near(all_samples / REGIONS, within=0.1),
        near(all_samples, within=0.1), near(all_samples / STEP, within=0.1),
    ]  # fmt: skip
    assert said("registry (") == [near(entry, within=0.3), near(REPLICAS / REGIONS * entry / 5, within=0.3),
                                  near(REPLICAS * entry / 5, within=0.3)]  # fmt: skip
    most = said("acks (")
    assert most[0] == near(ack)
    assert most[1:] == [near(REPLICAS * most[0]), near(REPLICAS / REGIONS * most[0]), near(REPLICAS * most[0])]
    assert f"{round(REPLICAS / STEP)} a second" in PAGE


def everywhere(size: float, fan_out: int, home_link: float, region_link: float) -> tuple[float, int]:
    """(seconds until the last region has the version, hops to it). Home and each region pass it on to up to `fan_out` others at
    once, which share its link out; a copy is passed on when it's whole, to whoever is next, and none arrives faster than
    `region_link`. Links in bytes a second."""
    waiting, hops, last = REGIONS, 0, 0.0
    having = [(0.0, 0, home_link)]
    while waiting:
        at, hop, link = heapq.heappop(having)
        copies = min(fan_out, waiting)
        waiting -= copies
        last = at + size / min(link / copies, region_link)
        hops = max(hops, hop + 1)
        for _ in range(copies):
            heapq.heappush(having, (last, hop + 1, region_link))
    return last, hops


@pytest.mark.parametrize(("fan_out", "home_link"), [(REGIONS, 50), (4, 50), (REGIONS, 10), (4, 10), (2, 10)])
def test_mirrors_of_mirrors_take_as_long_as_the_page_says(fan_out: int, home_link: int) -> None:
    """Regions have 8 Gbit/s either way."""
    seconds, hops = everywhere(MODEL / ratio(0), fan_out, home_link * 1e9 / 8, 1e9)
    row = re.compile(rf"^\| {fan_out} \| {home_link} Gbit/s \| (\d+) \| ([\d.]+) s \|", re.M)
    (found,) = row.findall(PAGE)
    assert (int(found[0]), float(found[1])) == (hops, near(seconds))
