"""A made run for one replica: a Qwen3-shaped model of over 100M parameters and a line of versions with realistic deltas."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from towline.config import StoreSettings
from towline.contract.entries import OpenEntry
from towline.delta.files import load_folder
from towline.delta.state import ModelState, RawTensor
from towline.store import keys
from towline.store.commit import version_entry
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.store.versions import VersionFacts, seed_base, write_version

RUN = "activation"
CONFIG = Qwen3Config(
    vocab_size=32_000, hidden_size=640, intermediate_size=1920, num_hidden_layers=19, num_attention_heads=10,
    num_key_value_heads=5, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=0.02,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MadeRun:
    """`versions` are the line's after the base model, each a delta on the one before."""

    objects: ObjectStore
    log: Log
    base: Path
    parameters: int
    versions: list[int]


def make_run(folder: Path, densities: list[float], seed: int = 0) -> MadeRun:
    """A version for each of `densities`, the share of the elements that it changes by one representable step."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(CONFIG).to(torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(folder / "base")
    del model
    objects = open_store(StoreSettings(url=(folder / "store").as_uri()))
    log = Log(objects, RUN)
    seed_base(objects, log, folder / "base", "made", None, None)
    write_id = keys.new_write_id()
    epoch = log.append(
        lambda log: OpenEntry(
            number=log.next_number, prev=log.head_digest, write_id=write_id, at=time.time(), base=0, base_digest=log.digest(0),
            depth=0, batch_cursor=0, checkpoint=None,
        )
    ).number  # fmt: skip
    random = np.random.default_rng(seed)
    state, base, versions = load_folder(folder / "base"), 0, []
    for depth, density in enumerate(densities, 1):
        new = _stepped(state, density, random)
        facts = VersionFacts(depth=depth, step=depth, batch_cursor=0)
        manifest = write_version(
            objects, RUN, epoch=epoch, base=base, write_id=keys.new_write_id(), base_state=state, new_state=new, facts=facts,
            base_digest=log.version(base).model_digest if base else None,
        )  # fmt: skip
        digest = manifest.digest
        base = log.append(lambda log, manifest=manifest, digest=digest: version_entry(log, manifest, digest, 0.0)).number  # type: ignore[misc]
        versions.append(base)
        state = new
    return MadeRun(objects, log, folder / "base", parameters, versions)


def _stepped(state: ModelState, density: float, random: np.random.Generator) -> ModelState:
    """Each element with the chance `density` a representable step up or down."""
    new: ModelState = {}
    for name, tensor in state.items():
        data = tensor.data.copy()
        bits = data.view("<u2")
        count = int(random.binomial(bits.size, density))
        positions = random.integers(0, bits.size, count)
        # A step down from either zero would be a NaN in these bits, and initialisation leaves a few zeros.
        positions = positions[bits[positions] & 0x7FFF != 0]
        count = positions.size
        bits[positions] += random.choice(np.array([1, 0xFFFF], np.uint16), count)
        new[name] = RawTensor(tensor.spec, data)
    return new
