"""What a Megatron learner over ranks must agree with: transformers after load and export, and the torch learner step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support import megatron_ranks
from support.megatron_model import make_model
from support.megatron_ranks import MORE, STEPS, TOKENS, batch_of
from support.ranks import run_ranks
from towline.learner.torch_backend import TorchLearner
from unit.learner.conftest import settings_for

Plan = dict[str, Any]
LAYOUT = ("dp", "tp", "pp", "sequence_parallel", "distributed_optimizer", "recompute", "dtype")
CLOSE = 1e-5
"""In per-token logprobs, fp32."""


def launch(folder: Path, plans: Iterable[Plan], size: int) -> Path:
    """All plans in one start of `size` ranks; the folder has a folder for each."""
    whole = []
    for plan in plans:
        kind, tied = plan["model"]
        model = folder / f"{kind}-{'tied' if tied else 'untied'}"
        if not model.exists():
            make_model(model, kind, tied=tied)
        whole.append({**plan, "model": str(model)})
    (folder / "plans.json").write_text(json.dumps(whole))
    run_ranks(Path(megatron_ranks.__file__), [str(folder / "plans.json")], size)
    return folder


def answers(folder: Path, plan: Plan, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / plan["name"] / f"rank-{rank}.json").read_text()) for rank in range(size)]


def model_of(folder: Path, plan: Plan) -> Path:
    kind, tied = plan["model"]
    return folder / f"{kind}-{'tied' if tied else 'untied'}"


def transformers_logprobs(folder: Path) -> torch.Tensor:
    """Of TOKENS[1:], by transformers itself."""
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None])[:, 0]


def off(found: list[float], wanted: torch.Tensor) -> float:
    return float((torch.tensor(found) - wanted).abs().max())


def check_logprobs(folder: Path, plan: Plan, size: int) -> None:
    """After load, and after STEPS training steps on what was exported."""
    exported = transformers_logprobs(folder / plan["name"] / "exported")
    loaded = transformers_logprobs(model_of(folder, plan))
    assert off(loaded.tolist(), exported) > 100 * CLOSE, "training changed too little to tell"
    for answer in answers(folder, plan, size):
        assert off(answer["loaded"], loaded) <= CLOSE
        assert off(answer["masters"], exported) <= CLOSE
        assert off(answer["published"], exported) <= CLOSE


def check_published(folder: Path, plan: Plan, size: int) -> None:
    """Each name on one rank, each rank with some; a version is the gathered state, and that is the trained parameters."""
    found = answers(folder, plan, size)
    names = [name for answer in found for name in answer["owned"]]
    assert len(names) == len(set(names))
    assert all(answer["owned"] for answer in found)
    assert found[0]["version_is_state"]
    assert all(answer["round_trip"] for answer in found)


def check_curve(folder: Path, plan: Plan, size: int) -> None:
    """The torch learner's, from the same batches; every rank reports the same."""
    found = answers(folder, plan, size)
    assert all(answer["reports"] == found[0]["reports"] for answer in found)
    trainer = {key: value for key, value in plan["trainer"].items() if key not in LAYOUT}
    model = model_of(folder, plan)
    learner = TorchLearner(model, settings_for(model, **trainer), 7)
    for depth in range(STEPS):
        wanted, report = learner.train(batch_of(depth)), found[0]["reports"][depth]
        for name in ("rows", "tokens", "optimiser_steps", "skip_reasons", "learning_rate", "for_depth"):
            assert report[name] == getattr(wanted, name)
        for name in ("loss", "gradient_norm", "mismatch_kl", "logprob_abs_diff", "effective_sample_share", "entropy"):
            near = pytest.approx(getattr(wanted, name), rel=plan.get("tolerance", 1e-4), abs=1e-6)
            assert report[name] == near, f"depth {depth}: {name} is {report[name]}, the torch learner's {getattr(wanted, name)}"


def check_resumed(folder: Path, plan: Plan, size: int) -> None:
    """From its checkpoint: in the same layout bit for bit, in another one closely."""
    for answer in answers(folder, plan, size):
        same = answer["resumed_same"]
        assert (same["reports"], same["difference"]) == (answer["more"], 0.0)
        for name in plan.get("other_layouts", {}):
            other = answer[f"resumed_{name}"]
            assert other["step"] == same["step"]
            assert other["difference"] <= CLOSE
            for mine, theirs in zip(other["reports"], answer["more"], strict=True):
                assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert len(same["reports"]) == MORE
