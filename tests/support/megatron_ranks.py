"""What each rank does in a test: `megatron_ranks.py PLANS.json`, under RANK and WORLD_SIZE. A plan is a learner over all ranks.

One start does all plans, since it costs many seconds. A rank writes what it found beside the plans: JSON, and safetensors.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from towline.config import StoreSettings
from towline.delta.codec import apply
from towline.delta.state import ModelState, RawTensor, TensorSpec, copy_state
from towline.errors import TowlineError
from towline.learner.base import Row, TrainBatch, pack_rows
from towline.learner.megatron.backend import MegatronLearner
from towline.learner.sharing import Share, divide
from towline.learner.torch_model import from_raw
from towline.learner.world import World, join_world
from towline.store import keys
from towline.store.manifest import VersionFacts
from towline.store.objects import open_store
from towline.store.transfer import fetch_all
from towline.store.versions import Shard, write_manifest, write_shard
from unit.learner.conftest import make_batch, settings_for

TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 17, 20)]
STEPS, MORE = 5, 2


def settings_of(plan: dict[str, Any], **changes: Any) -> Any:
    settings = settings_for(Path(plan["model"]), backend="megatron", **{**plan["trainer"], **changes})
    model = settings.model.model_copy(update={"publish_dtype": plan.get("publish", "float32")})
    return settings.model_copy(update={"model": model})


def batch_of(depth: int) -> TrainBatch:
    return make_batch(60 + depth, for_depth=depth)


def shared(batch: TrainBatch, learner: MegatronLearner) -> TrainBatch:
    """This rank's rows of the batch, as the trainer service gives them."""
    place = learner.place
    if place.count == 1:
        return batch
    mine = divide([int(tokens) for tokens in batch.policy_tokens], place.count)[place.index]
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


def train(learner: MegatronLearner, first: int, count: int) -> list[dict[str, Any]]:
    return [asdict(learner.train(shared(batch_of(depth), learner))) for depth in range(first, first + count)]


def on_all(world: World, folder: Path, name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Every rank's files, by way of the disk."""
    for file, data in files.items():
        (folder / f"{name}-{file}").write_bytes(data)
    world.barrier()
    return {path.name.removeprefix(f"{name}-"): path.read_bytes() for path in sorted(folder.glob(f"{name}-*"))}


def publish(world: World, folder: Path, base: ModelState, state: ModelState, whole: ModelState) -> None:
    """Stage a version side by side, each rank its own `state` on its own `base`; rank 0 applies it to `whole`, the whole base."""
    objects = open_store(StoreSettings(url=(folder / "store").as_uri()))
    where = keys.version_folder("run", 1, 0, "w")
    shard = write_shard(objects, where, world.rank, base_state=base, new_state=state, prove=True)
    shards = world.gather(msgspec.msgpack.encode(shard))
    if shards is None:
        return
    manifest = write_manifest(
        objects, "run", epoch=1, base=0, write_id="w", facts=VersionFacts(depth=1, step=1, batch_cursor=1),
        shards=[msgspec.msgpack.decode(each, type=Shard) for each in shards],
    )  # fmt: skip
    parts = (data for _, data in fetch_all(objects, where, manifest.parts))
    apply(whole, parts, layout=manifest.layout(), digests=manifest.digests())


def save(state: ModelState, path: Path) -> None:
    save_file({name: from_raw(raw) for name, raw in state.items()}, path)


def gathered(world: World, state: ModelState) -> ModelState:
    """Every rank's part on every rank."""
    whole: ModelState = {}
    own = {name: (raw.spec, raw.data.tobytes()) for name, raw in state.items()}
    for part in world.all_gather(msgspec.msgpack.encode(own)):
        for name, (spec, data) in msgspec.msgpack.decode(part, type=dict[str, tuple[Any, bytes]]).items():
            assert name not in whole, f"two ranks publish {name}"
            found = TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"]))
            whole[name] = RawTensor(found, np.frombuffer(data, np.uint8).copy())
    return whole


def scenario(plan: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    learner = MegatronLearner(Path(plan["model"]), settings_of(plan), 7, world)
    loaded = learner.state()
    answer: dict[str, Any] = {"loaded": learner.logprobs(TOKENS), "owned": sorted(loaded)}
    answer["reports"] = train(learner, 0, STEPS)
    state = learner.state()
    whole = gathered(world, state)
    if world.rank == 0:
        (folder / "exported").mkdir()
        (folder / "exported" / "config.json").write_bytes((Path(plan["model"]) / "config.json").read_bytes())
        save(whole, folder / "exported" / "model.safetensors")
    answer["masters"], answer["published"] = learner.logprobs(TOKENS), learner.logprobs(TOKENS, state)
    version = gathered(world, copy_state(loaded))
    publish(world, folder, loaded, state, version)
    if world.rank == 0:
        answer["version_is_state"] = all(np.array_equal(version[name].data, raw.data) for name, raw in whole.items())
    world.barrier()
    # What was exported, read again by a fresh learner, is the very parameters that were trained.
    again = MegatronLearner(folder / "exported", settings_of(plan), 7, world)
    mine = learner._model.parameters
    answer["round_trip"] = all(torch.equal(value, mine[name]) for name, value in again._model.parameters.items())
    files = on_all(world, folder, "checkpoint", learner.checkpoint())
    answer["more"] = train(learner, STEPS, MORE)
    end = gathered(world, learner.state())
    for name, layout in {"same": {}, **plan.get("other_layouts", {})}.items():
        resumed = MegatronLearner(Path(plan["model"]), settings_of(plan, **layout), 99, world)
        resumed.restore(files)
        reports = train(resumed, STEPS, MORE)
        found = gathered(world, resumed.state())
        difference = max(float((from_raw(found[n]).float() - from_raw(end[n]).float()).abs().max()) for n in end)
        answer[f"resumed_{name}"] = {"reports": reports, "difference": difference, "step": resumed.step}
    if plan.get("spoil"):
        if world.rank == world.size - 1:
            with torch.no_grad():
                next(value for name, value in mine.items() if "layernorm" in name).view(-1)[0] += 1.0
        try:
            learner.state()
        except TowlineError as error:
            answer["spoiled"] = [error.code, error.message]
    return answer


def broken(plan: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    """A loss that isn't finite once: what the reports say, and whether the weights are those before that step."""
    learner = MegatronLearner(Path(plan["model"]), settings_of(plan), 7, world)
    first = train(learner, 0, 1)
    before, checkpoint = gathered(world, learner.state()), learner.checkpoint()
    second = train(learner, 1, 1)
    after, kept = gathered(world, learner.state()), learner.checkpoint()
    third = train(learner, 2, 1)
    moments = [name for name in checkpoint if name.startswith("exp_avg")]
    return {
        "reports": first + second + third,
        "weights_kept": all(np.array_equal(after[name].data, raw.data) for name, raw in before.items()),
        "moments_kept": all(checkpoint[name] == kept[name] for name in moments),
        "went_on": any(not np.array_equal(raw.data, before[name].data) for name, raw in gathered(world, learner.state()).items()),
    }


def main() -> None:
    path = Path(sys.argv[1])
    world = join_world("cpu")
    for plan in json.loads(path.read_text()):
        folder = path.parent / plan["name"]
        folder.mkdir(exist_ok=True)
        world.barrier()
        answer = (broken if plan.get("broken") else scenario)(plan, world, folder)
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(answer, default=lambda value: value.item()))
        world.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
