"""Small models with the dtypes of real ones, their updates, and committing them without a publisher."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from towline.contract.entries import LogEntry, VersionEntry
from towline.delta.state import ModelState, RawTensor, TensorSpec, copy_state
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.store.manifest import Manifest, VersionFacts
from towline.store.objects import ObjectStore
from towline.store.versions import seed_base_state, write_version

from . import logs

OTHERS = {"config.json": b'{"model_type":"tiny"}', "tokenizer.json": b"{}"}


def model(seed: int = 0, rows: int = 96) -> ModelState:
    rng = np.random.default_rng(seed)
    specs = [
        TensorSpec("model.embed.weight", "BF16", (rows, 32)),
        TensorSpec("model.layers.0.weight", "BF16", (64, 32)),
        TensorSpec("model.norm.weight", "F32", (32,)),
        TensorSpec("model.scale", "F16", ()),
    ]
    return {spec.name: RawTensor(spec, rng.integers(0, 63, spec.nbytes, np.uint8)) for spec in specs}


def stepped(state: ModelState, seed: int, share: float = 0.05) -> ModelState:
    """Some bytes of every tensor but the last are another."""
    rng = np.random.default_rng(seed)
    new = copy_state(state)
    for name in sorted(new)[:-1]:
        data = new[name].data
        places = rng.choice(data.size, max(1, int(share * data.size)), replace=False)
        data[places] ^= rng.integers(1, 4, places.size, np.uint8)
    return new


def same(a: ModelState, b: ModelState) -> bool:
    return a.keys() == b.keys() and all(a[n].spec == b[n].spec and np.array_equal(a[n].data, b[n].data) for n in a)


def entry_of(manifest: Manifest) -> logs.Build:
    """The entry that commits it, written out by hand."""

    def build(log: Log) -> LogEntry:
        facts = manifest.facts
        return VersionEntry(
            number=log.next_number,
            prev=log.head_digest,
            write_id=manifest.write_id,
            at=time.time(),
            epoch=manifest.epoch,
            base=manifest.base,
            base_digest=log.digest(manifest.base),
            depth=facts.depth,
            skipped=facts.skipped,
            representation=manifest.representation,
            codec=manifest.codec,
            folder=manifest.folder,
            manifest_digest=manifest.digest,
            layout_digest=manifest.layout_digest,
            model_digest=manifest.model_digest,
            density=manifest.density,
            wire_bytes=manifest.wire_bytes,
            model_bytes=manifest.model_bytes,
            step=facts.step,
            batch_cursor=facts.batch_cursor,
            checkpoint=facts.checkpoint,
            probe=facts.probe,
            encode_seconds=manifest.encode_seconds,
            upload_seconds=manifest.upload_seconds,
            verify_seconds=0.0,
        )

    return build


@dataclass
class Run:
    """A run's LOG with the state of every version that was committed."""

    objects: ObjectStore
    log: Log
    states: dict[int, ModelState] = field(default_factory=dict)

    def stage(self, state: ModelState, *, full: bool = False, write_id: str | None = None, checkpoint: str | None = None,
              base: int | None = None, epoch: int | None = None, prove: bool = False) -> Manifest:  # fmt: skip
        self.log.refresh()
        of = self.log.lineage.newest_epoch if epoch is None else epoch
        assert of is not None
        on = self.log.lineage.epoch_head(of) if base is None else base
        depth = self.log.lineage.depth(on) + 1
        return write_version(
            self.objects,
            self.log.run,
            epoch=of,
            base=on,
            write_id=write_id or new_write_id(),
            base_state=None if full else self.states[on],
            new_state=state,
            facts=VersionFacts(depth=depth, step=depth, batch_cursor=10 * depth, checkpoint=checkpoint),
            prove=prove,
        )

    def commit(self, state: ModelState | None = None, *, full: bool = False) -> int:
        """Commit `state`, or the next step on the epoch's head."""
        self.log.refresh()
        epoch = self.log.lineage.newest_epoch
        assert epoch is not None
        head = self.log.lineage.epoch_head(epoch)
        chosen = stepped(self.states[head], self.log.next_number) if state is None else state
        return self.commit_staged(self.stage(chosen, full=full), chosen)

    def commit_staged(self, manifest: Manifest, state: ModelState) -> int:
        number = self.log.append(entry_of(manifest)).number
        self.states[number] = state
        return number

    def fork(self, base: int) -> int:
        return self.log.append(logs.opened(base=base)).number


def begun(objects: ObjectStore, name: str, state: ModelState | None = None) -> Run:
    """Entry 0 and epoch 1."""
    run = Run(objects, Log(objects, name))
    chosen = model() if state is None else state
    seed_base_state(objects, run.log, chosen, OTHERS, "test", None, None)
    run.log.append(logs.opened())
    run.states[0] = chosen
    return run
