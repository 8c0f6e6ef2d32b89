"""The parts of a replay that need no run: numbers apart, pace, reports, scores compared."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from towline.bundle.select import Selected
from towline.bus.client import Message
from towline.delta.state import RawTensor, TensorSpec
from towline.learner.fingerprint import differences
from towline.learner.torch_model import to_raw
from towline.replay.compare import as_numbers, differing, distance
from towline.replay.pace import paced
from towline.replay.report import VerifyReport, VersionResult
from towline.replay.rescore import Rescored, RescoreReport


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_are_what_torch_says(dtype):
    values = torch.tensor([0.0, -1.5, 3.14159, 1e-3, -65000.0], dtype=dtype)
    found = as_numbers(to_raw("w", values))
    assert found is not None
    assert found.tolist() == values.double().tolist()


def test_the_largest_difference_and_its_tensor_are_found():
    a = {"x": to_raw("x", torch.tensor([1.0, 2.0])), "y": to_raw("y", torch.tensor([[5.0]]))}
    b = {"x": to_raw("x", torch.tensor([1.0, 2.25])), "y": to_raw("y", torch.tensor([[4.0]]))}
    found = distance(a, b)
    assert (found.max_abs_diff, found.tensor) == (1.0, "y")
    assert distance(a, a).max_abs_diff == 0.0
    nan = {"x": to_raw("x", torch.tensor([float("nan"), 2.0]))}
    assert distance(nan, nan).max_abs_diff == 0.0
    assert distance(nan, a).max_abs_diff == np.inf
    numbers = {"i": RawTensor(TensorSpec("i", "I8", (1,)), np.zeros(1, np.uint8))}
    assert distance(numbers, numbers).max_abs_diff is None


def test_differing_tensors_are_named_in_order():
    assert differing({"b": "1", "a": "2", "c": "3"}, {"a": "2", "b": "x", "d": "4"}) == ["b", "c", "d"]
    assert differences({"torch": "1", "threads": "1"}, {"torch": "2", "threads": "1", "isa": "x"}) == {
        "torch": ("1", "2"), "isa": ("-", "x"),
    }  # fmt: skip


async def stream(*times):
    for number, at in enumerate(times):
        yield Selected(Message("s", number + 1, b"", {}, at), None, None)


async def test_messages_come_at_the_pace_that_was_asked_for():
    began = time.monotonic()
    assert [item.message.sequence async for item in paced(stream(100.0, 100.3, 100.4), speed=2.0)] == [1, 2, 3]
    assert time.monotonic() - began >= 0.2
    began = time.monotonic()
    assert [item.message.sequence async for item in paced(stream(0.0, 1000.0, 2000.0), speed=0.0)] == [1, 2, 3]
    assert time.monotonic() - began < 500.0


async def test_steps_wait_and_a_limit_ends():
    waits = []

    async def wait():
        waits.append(len(waits))

    found = [item.message.sequence async for item in paced(stream(1.0, 2.0, 3.0), speed=0, limit=2, wait=wait)]
    assert (found, waits) == ([1, 2], [0, 1])


def result(version, equal, **fields):
    return VersionResult(
        version=version, depth=version, epoch=1, batches=(version - 1,), equal=equal, recorded_digest="a" * 64,
        replayed_digest="b" * 64, **fields,
    )  # fmt: skip


def test_a_report_is_equal_only_where_every_planned_version_is():
    report = VerifyReport(run="small", start=0, end=2, planned=2, results=[result(1, True)], environments={1: {}})
    assert not report.equal
    assert next(report.lines()).startswith("not finished: 1 of 2")
    report.results.append(result(2, True))
    assert report.equal
    assert next(report.lines()) == "equal: 2 versions of run small trained again bit for bit (versions 0 to 2)"
    report.stopped = "no more"
    assert not report.equal


def test_a_parting_names_step_and_tensor_and_another_environment_is_no_verdict():
    parted = result(2, False, first_tensor="w.0", differing_tensors=1, tensors=3, max_abs_diff=0.5)
    report = VerifyReport(run="small", start=0, end=2, planned=2, results=[result(1, True), parted], environments={1: {}})
    text = "\n".join(report.lines())
    assert text.startswith("parted at version 2: run small, 1 equal before it")
    assert "step 1 (depth 2, epoch 1)" in text
    assert "first tensor: w.0 (1 of 3 differ)" in text
    report.environments[1] = {"threads": ("1", "4")}
    text = "\n".join(report.lines())
    assert text.startswith("not comparable bit for bit")
    assert "epoch 1: threads was '1', is '4'" in text
    assert "version     2  depth     2  0.5" in text


def test_scores_are_compared_where_there_are_both():
    report = RescoreReport("mine:f", [Rescored(0, 0, 1.0, 0.5), Rescored(0, 1, 0.0, 0.0), Rescored(1, 0, None, 3.0),
                                      Rescored(1, 1, 1.0, None, {}, "mine:f raised")])  # fmt: skip
    found = report.summary()
    assert (found["samples"], found["compared"], found["changed"], found["lower"], found["failed"]) == (4, 2, 1, 1, 1)
    assert (found["mean_recorded"], found["mean"], found["max_abs_diff"]) == (0.5, 0.25, 0.5)
    assert found["correlation"] == pytest.approx(1.0)
    assert RescoreReport("mine:f", []).summary()["mean"] is None
