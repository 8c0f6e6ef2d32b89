"""What each rank of a torch learner does in a test, started by torchrun: `python -m torch.distributed.run … ranks.py PLAN.json`.

Every scenario of a plan is one learner over all ranks; one launch does them all, since a start costs many seconds. What a rank
found it writes beside the plan, as safetensors and JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from towline.delta.state import ModelState
from towline.errors import TowlineError
from towline.learner.base import Row, TrainBatch, pack_rows
from towline.learner.sharing import Share, divide
from towline.learner.torch_backend import TorchLearner
from towline.learner.torch_model import from_raw
from towline.learner.world import World, join_world
from unit.learner.conftest import make_batch, settings_for


def shared_batch(batch: TrainBatch, world: World) -> TrainBatch:
    """This rank's rows of a whole batch, as the trainer service gives them."""
    mine = divide([int(length) for length in batch.lengths], world.size)[world.rank]
    rows = []
    for row in mine:
        part = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        rows.append(
            Row(
                group=0, sample=int(row), tokens=batch.tokens[part], loss_mask=batch.loss_mask[part],
                logprobs=batch.logprobs[part], versions=batch.versions[part], temperature=float(batch.temperatures[row]),
                advantage=float(batch.advantages[row]), staleness=int(batch.staleness[row]),
            )
        )  # fmt: skip
    return pack_rows(batch.for_depth, rows, Share(mine=mine, advantages=batch.advantages, policy_tokens=batch.policy_tokens))


class Files(dict[str, bytes]):
    """Every rank's checkpoint files, read from disk when asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __getitem__(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None


def batches(first: int, count: int, rows: int) -> list[TrainBatch]:
    return [make_batch(40 + depth, for_depth=depth, rows=rows) for depth in range(first, first + count)]


def run(learner: TorchLearner, world: World, found: list[TrainBatch]) -> list[dict[str, Any]]:
    return [asdict(learner.train(shared_batch(batch, world) if world.size > 1 else batch)) for batch in found]


def save_state(state: ModelState, path: Path) -> None:
    save_file({name: from_raw(raw) for name, raw in state.items()}, path)


def scenario(plan: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    """Train, checkpoint in the middle, train on; then the same from the checkpoint, also under `restored` settings."""
    model, rows = Path(plan["model"]), int(plan.get("rows", 12))
    settings = settings_for(model, **plan["trainer"])
    learner = TorchLearner(model, settings, 7, world)
    reports = run(learner, world, batches(0, 3, rows))
    files = learner.checkpoint()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    world.barrier()
    reports += run(learner, world, batches(3, 2, rows))
    state = learner.state()
    save_state(state, folder / f"state-{world.rank}.safetensors")
    answer: dict[str, Any] = {
        "reports": reports,
        "files": sorted(files),
        "names": sorted(state),
        "logprobs": learner.logprobs([3, 1, 4, 1, 5], state),
        "masters": learner.logprobs([3, 1, 4, 1, 5]),
    }
    again = TorchLearner(model, settings_for(model, **(plan["trainer"] | plan.get("restored", {}))), 99, world)
    again.restore(Files(folder))
    answer["again"] = run(again, world, batches(3, 2, rows))
    save_state(again.state(), folder / f"again-{world.rank}.safetensors")
    if plan.get("spoil"):
        if world.rank == 1:
            with torch.no_grad():
                next(iter(again._parameters.values())).view(-1)[0] += 1.0
        try:
            again.state()
        except TowlineError as error:
            answer["spoiled"] = [type(error).__name__, error.code, error.message]
    return answer


def main() -> None:
    plan_path = Path(sys.argv[1])
    world = join_world("cpu")
    for plan in json.loads(plan_path.read_text()):
        folder = plan_path.parent / plan["name"]
        folder.mkdir(exist_ok=True)
        answer = scenario(plan, world, folder)
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(answer, default=_plain))
        world.barrier()
    torch.distributed.destroy_process_group()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value).__name__)


if __name__ == "__main__":
    main()
