"""Two ranks as one torch learner, in real processes over gloo: what the single process computes, DDP and FSDP2 compute too."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from towline.errors import UsageError
from towline.learner.torch_backend import TorchLearner
from towline.learner.torch_parallel import layers_of, owners
from towline.learner.world import World
from unit.learner.conftest import settings_for
from unit.learner.ranks import Files, batches, run, save_state

RANKS = 2
LAUNCH_SECONDS = 300
TRAINER: dict[str, Any] = {
    "minibatches": 2, "micro_batch_tokens": 24, "weight_decay": 0.1, "warmup_steps": 2, "correction": "tis", "dp": RANKS,
}  # fmt: skip
QUICK: list[dict[str, Any]] = [
    {"name": "ddp", "trainer": {**TRAINER, "parallel": "ddp"}, "spoil": True},
    {"name": "fsdp", "trainer": {**TRAINER, "parallel": "fsdp"}},
    {
        "name": "broken",
        "trainer": {
            "dp": RANKS, "loss": "unit.learner.custom_losses:BrokenOnRank", "loss_arguments": {"rank": 1, "first": 1, "last": 1},
        },
    },
]  # fmt: skip
SLOW: list[dict[str, Any]] = [
    {
        "name": "fsdp-extras",
        "trainer": {**TRAINER, "parallel": "fsdp", "recompute": True, "packing": True, "loss_arguments": {"kl": 0.1}},
        "restored": {"parallel": "ddp", "recompute": False},
    },
    {"name": "few-rows-fsdp", "trainer": {**TRAINER, "parallel": "fsdp"}, "rows": 3},
    {"name": "few-rows-ddp", "trainer": {**TRAINER, "parallel": "ddp"}, "rows": 3},
    {"name": "bf16", "trainer": {**TRAINER, "parallel": "fsdp", "dtype": "bfloat16"}, "tolerance": 0.05},
]  # fmt: skip
PLANS = [pytest.param(plan, id=plan["name"]) for plan in QUICK[:2]]
PLANS += [pytest.param(plan, id=plan["name"], marks=pytest.mark.slow) for plan in SLOW]


def launch(model: Path, folder: Path, plans: list[dict[str, Any]]) -> Path:
    """Both ranks through all plans, in one start, as torchrun would start them; the folder where they left what they found."""
    (folder / "plan.json").write_text(json.dumps([{**plan, "model": str(model)} for plan in plans]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(folder / "plan.json")]
    ranks = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "WORLD_SIZE": str(RANKS)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=LAUNCH_SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(error[-3000:] for error in errors)
    return folder


@pytest.fixture(scope="module")
def quick(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(model_folder, tmp_path_factory.mktemp("ranks"), QUICK)


@pytest.fixture(scope="module")
def slow(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(model_folder, tmp_path_factory.mktemp("ranks"), SLOW)


@pytest.fixture
def launched(plan: dict[str, Any], request: pytest.FixtureRequest) -> Path:
    """Of the plan at hand."""
    found = request.getfixturevalue("quick" if plan in QUICK else "slow")
    assert isinstance(found, Path)
    return found


def answers(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((folder / name / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def joined(folder: Path, name: str, kind: str) -> dict[str, torch.Tensor]:
    """The ranks' parts of a state or a checkpoint as one; no name may stand on two. `kind` is a file's name, {} the rank."""
    parts = [load_file(folder / name / f"{kind.format(rank)}.safetensors") for rank in range(RANKS)]
    assert not set(parts[0]) & set(parts[1])
    assert all(parts)
    return {**parts[0], **parts[1]}


@dataclass
class Single:
    """What one process makes of the same batches."""

    reports: list[dict[str, Any]]
    masters: dict[str, torch.Tensor]
    """fp32, after three batches: the ranks' checkpoint is of that moment."""
    state: dict[str, torch.Tensor]
    """As published, after all five."""


def single(model_folder: Path, plan: dict[str, Any], folder: Path) -> Single:
    trainer = {key: value for key, value in plan["trainer"].items() if key not in ("dp", "parallel")}
    learner = TorchLearner(model_folder, settings_for(model_folder, **trainer), 7)
    reports = run(learner, World(), batches(0, 3, plan.get("rows", 12)))
    masters = load(learner.checkpoint()["weights.safetensors"])
    reports += run(learner, World(), batches(3, 2, plan.get("rows", 12)))
    save_state(learner.state(), folder / "state.safetensors")
    return Single(reports, masters, load_file(folder / "state.safetensors"))


@pytest.mark.parametrize("plan", PLANS)
def test_two_ranks_go_the_way_of_one(launched: Path, model_folder: Path, tmp_path: Path, plan: dict[str, Any]) -> None:
    found = answers(launched, plan["name"])
    assert found[0]["reports"] == found[1]["reports"]
    wanted = single(model_folder, plan, tmp_path)
    rough = plan.get("tolerance")
    for mine, theirs in zip(found[0]["reports"], wanted.reports, strict=True):
        for name in ("rows", "tokens", "optimiser_steps", "skip_reasons", "learning_rate", "for_depth"):
            assert mine[name] == theirs[name]
        for name in ("loss", "gradient_norm", "mismatch_kl", "logprob_abs_diff", "effective_sample_share", "clip_low"):
            assert mine[name] == pytest.approx(theirs[name], rel=rough or 1e-4, abs=rough or 1e-6)
    masters = joined(launched, plan["name"], "weights-{:05d}-of-00002")
    exported = joined(launched, plan["name"], "state-{}")
    assert set(masters) == set(wanted.masters)
    assert set(exported) == set(wanted.state)
    if rough:
        return
    for name, tensor in wanted.masters.items():
        torch.testing.assert_close(masters[name], tensor, atol=1e-6, rtol=0)
    # Published in bf16: a value that lies on an edge may fall to either side.
    differing = [float((exported[name] != tensor).float().mean()) for name, tensor in wanted.state.items()]
    assert max(differing) < 0.01


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_go_on_from_their_checkpoint(launched: Path, plan: dict[str, Any]) -> None:
    found = answers(launched, plan["name"])
    first, again = joined(launched, plan["name"], "state-{}"), joined(launched, plan["name"], "again-{}")
    if "restored" not in plan:
        assert found[0]["again"] == found[0]["reports"][3:]
        assert all(torch.equal(first[name], again[name]) for name in first)
    else:  # another layout of the same ranks: the same numbers to rounding
        for name, tensor in first.items():
            torch.testing.assert_close(again[name].float(), tensor.float(), atol=1e-6, rtol=2**-7)


def test_a_checkpoint_of_two_ranks_is_read_by_one_process(quick: Path, model_folder: Path) -> None:
    trainer = {key: value for key, value in TRAINER.items() if key != "dp"}
    learner = TorchLearner(model_folder, settings_for(model_folder, **trainer), 99)
    learner.restore(Files(quick / "fsdp"))
    reports = run(learner, World(), batches(3, 2, 12))
    for mine, theirs in zip(reports, answers(quick, "fsdp")[0]["reports"][3:], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
    both = [set(answer["files"]) for answer in answers(quick, "fsdp")]
    assert not both[0] & both[1]
    assert both[0] | both[1] == {
        "learner.json", "weights-00000-of-00002.safetensors", "weights-00001-of-00002.safetensors",
        "optimiser-00000-of-00002.safetensors", "optimiser-00001-of-00002.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_probe_is_that_of_the_published_weights(quick: Path, model_folder: Path, name: str) -> None:
    found = answers(quick, name)
    assert found[0]["logprobs"] == found[1]["logprobs"]
    state = joined(quick, name, "state-{}")
    learner = TorchLearner(model_folder, settings_for(model_folder), 0)
    with torch.no_grad():
        for key, parameter in learner._parameters.items():
            parameter.copy_(state[key].float())
    assert found[0]["logprobs"] == pytest.approx(learner.logprobs([3, 1, 4, 1, 5]), abs=1e-5)
    assert found[0]["masters"] != pytest.approx(found[0]["logprobs"], abs=1e-5)


def test_copies_that_differ_are_told_on_every_rank(quick: Path) -> None:
    for answer in answers(quick, "ddp"):
        kind, code, message = answer["spoiled"]
        assert (kind, code) == ("InvariantError", "copies_differ")
        assert "embed_tokens" in message


def test_a_step_that_one_rank_cannot_take_is_taken_by_none(quick: Path) -> None:
    """Rank 1's loss isn't finite in the second batch alone."""
    found = answers(quick, "broken")
    assert found[0]["reports"] == found[1]["reports"]
    assert [report["skip_reasons"] for report in found[0]["reports"]] == [{}, {"non_finite_loss": 1}, {}, {}, {}]
    assert [report["optimiser_steps"] for report in found[0]["reports"]] == [1, 0, 1, 1, 1]


def test_every_name_has_one_owner_and_the_ranks_about_as_much() -> None:
    sizes = {f"layer{number}": 10 + number for number in range(20)} | {"embedding": 150}
    found = owners(sizes, 3)
    assert set(found) == set(sizes)
    loads = [sum(sizes[name] for name, rank in found.items() if rank == each) for each in range(3)]
    assert max(loads) - min(loads) <= 30
    assert owners(dict(reversed(sizes.items())), 3) == found


def test_a_model_without_named_layers_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="Linear names no layers"):
        layers_of(torch.nn.Linear(2, 2))
