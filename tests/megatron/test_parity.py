"""Every way to split the model and the batch: two ranks in one start, four in another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.megatron_checks import (
    Plan,
    answers,
    check_curve,
    check_logprobs,
    check_published,
    check_resumed,
    launch,
    model_of,
    off,
    transformers_logprobs,
)

pytestmark = pytest.mark.megatron

COMMON: dict[str, Any] = {
    "learning_rate": 1e-3,
    "minibatches": 2,
    "micro_batch_tokens": 30,
    "weight_decay": 0.1,
    "warmup_steps": 2,
}
PIPELINE = {"tp": 1, "pp": 2, "sequence_parallel": False}
DATA = {"tp": 1, "pp": 1, "dp": 2, "sequence_parallel": False, "distributed_optimizer": True}
TWO: list[Plan] = [
    {
        "name": "tp2", "model": ("qwen3", True), "trainer": {**COMMON, "tp": 2}, "spoil": True,
        "other_layouts": {"pp2": PIPELINE, "dp2": DATA},
    },
    {
        "name": "tp2-sequence", "model": ("llama", False),
        "trainer": {**COMMON, "tp": 2, "sequence_parallel": True, "recompute": True, "correction": "tis"},
    },
    {
        "name": "pp2", "model": ("qwen2", True), "trainer": {**COMMON, "pp": 2},
        "other_layouts": {"tp2": {"pp": 1, "tp": 2}},
    },
    {"name": "pp2-untied", "model": ("llama", False), "trainer": {**COMMON, "pp": 2, "loss": "decoupled_ppo"}},
    {
        "name": "dp2", "model": ("qwen3", False), "trainer": {**COMMON, "dp": 2, "distributed_optimizer": True},
        "other_layouts": {"tp2": {"dp": 1, "tp": 2, "distributed_optimizer": False}},
    },
    {"name": "dp2-whole", "model": ("qwen2", False), "trainer": {**COMMON, "dp": 2, "loss": "gspo", "loss_arguments": {}}},
    {
        "name": "tp2-penalties", "model": ("qwen2", False),
        "trainer": {**COMMON, "tp": 2, "loss_arguments": {"kl": 0.1, "entropy": 0.01}},
    },
]  # fmt: skip
FOUR: list[Plan] = [
    {
        "name": "tp2-pp2", "model": ("qwen3", True), "trainer": {**COMMON, "tp": 2, "pp": 2},
        "other_layouts": {"dp2tp2": {"tp": 2, "dp": 2, "pp": 1, "distributed_optimizer": True}},
    },
    {
        "name": "tp2-dp2", "model": ("llama", False),
        "trainer": {**COMMON, "tp": 2, "dp": 2, "sequence_parallel": True, "distributed_optimizer": True},
    },
    {
        "name": "pp2-dp2", "model": ("qwen2", True),
        "trainer": {**COMMON, "pp": 2, "dp": 2, "distributed_optimizer": True, "loss_arguments": {"kl": 0.1, "entropy": 0.01}},
    },
]  # fmt: skip
BROKEN = "support.broken_loss:BrokenOnce"
OTHERS: list[Plan] = [
    {
        "name": "nan-pp2", "model": ("qwen2", True), "broken": True,
        "trainer": {"pp": 2, "loss": BROKEN, "loss_arguments": {"call": 1}},
    },
    {
        "name": "nan-dp2", "model": ("qwen3", False), "broken": True,
        "trainer": {"dp": 2, "distributed_optimizer": True, "loss": BROKEN, "loss_arguments": {"call": 1, "rank": 1}},
    },
    {
        "name": "gradient-tp2", "model": ("qwen3", True), "broken": True,
        "trainer": {"tp": 2, "loss": BROKEN, "loss_arguments": {"call": 1, "gradient": True}},
    },
    {
        "name": "bf16", "model": ("qwen3", True), "publish": "bfloat16",
        "trainer": {**COMMON, "tp": 2, "dtype": "bfloat16"}, "tolerance": 0.1,
    },
]  # fmt: skip
PLANS = [pytest.param(plan, 2, id=plan["name"]) for plan in TWO] + [pytest.param(plan, 4, id=plan["name"]) for plan in FOUR]
CHECKS = [check_logprobs, check_published, check_curve, check_resumed]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("two"), TWO + OTHERS, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("four"), FOUR, 4)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
@pytest.mark.parametrize(("plan", "size"), PLANS)
def test_ranks_agree_with_one_process(
    plan: Plan, size: int, check: Callable[[Path, Plan, int], None], request: pytest.FixtureRequest
) -> None:
    check(request.getfixturevalue("two" if size == 2 else "four"), plan, size)


def test_copies_that_drift_apart_are_named(two: Path) -> None:
    for answer in answers(two, TWO[0], 2):
        code, message = answer["spoiled"]
        assert code == "ranks_differ"
        assert message.startswith("ranks 0 and 1 have different weights of model.layers.0.input_layernorm.weight")


@pytest.mark.parametrize(("name", "reason"), [
    ("nan-pp2", "non_finite_loss"), ("nan-dp2", "non_finite_loss"), ("gradient-tp2", "non_finite_gradient"),
])  # fmt: skip
def test_a_step_that_isnt_finite_is_left_out_on_all_ranks(two: Path, name: str, reason: str) -> None:
    for rank in range(2):
        answer = json.loads((two / name / f"rank-{rank}.json").read_text())
        assert [report["skip_reasons"] for report in answer["reports"]] == [{}, {reason: 1}, {}]
        assert [report["optimiser_steps"] for report in answer["reports"]] == [1, 0, 1]
        assert answer["weights_kept"]
        assert answer["moments_kept"]
        assert answer["went_on"]


def test_bf16_trains_close_to_fp32_and_publishes_what_it_computes_with(two: Path) -> None:
    plan = OTHERS[-1]
    check_published(two, plan, 2)
    exported = transformers_logprobs(two / "bf16" / "exported")
    found = answers(two, plan, 2)[0]
    assert off(found["loaded"], transformers_logprobs(model_of(two, plan))) < 0.2
    assert off(found["published"], exported) < 0.2
    check_curve(two, plan, 2)
    check_resumed(two, plan, 2)
    assert torch.isfinite(torch.tensor(found["masters"])).all()
