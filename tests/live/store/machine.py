"""Every interleaving of what trainers, publishers, readers and collectors do to one run, beside a model that a page can hold.

The model knows numbers, states and times. It promises: one lineage, every commit decided as it decides it, and every version
that was needed at each collection (or was needed less than a grace ago) comes back bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from towline.config import PublisherSettings
from towline.contract.policy import Committed, Staged
from towline.delta.state import ModelState, RawTensor, TensorSpec
from towline.errors import MissingError, UnavailableError
from towline.publisher.core import PublisherCore
from towline.store import checkpoints, claims, keys
from towline.store.anchors import record_anchor, upload_anchor
from towline.store.claims import Hold, Pin
from towline.store.collect import collect, pin, store_time
from towline.store.log import Log
from towline.store.objects import ObjectInfo, ObjectStore
from towline.store.quarantine import quarantine
from towline.store.retention import Rules
from towline.store.versions import VersionFacts, materialize, seed_base_state, write_version

from . import logs
from .faulty import lose
from .models import same, stepped

GRACE = 1000.0
RULES = Rules(grace_seconds=GRACE)
PICK = st.integers(0, 10_000)
PLANS = st.lists(st.tuples(PICK, st.booleans(), st.booleans()), min_size=3, max_size=6)
WAITS = st.sampled_from([0.0, GRACE / 2, GRACE + 5])


class Died(Exception):
    """The process that used the store is gone."""


class World:
    """A real store whose clock can be set forward, and whose users die or lose a reply at a chosen change."""

    def __init__(self, real: ObjectStore) -> None:
        self.real, self.ahead = real, 0.0
        self.dies_after: int | None = None
        self.loses_reply = False
        self._ahead_at: dict[str, float] = {}

    def _change(self, key: str) -> None:
        if self.dies_after is not None:
            if self.dies_after == 0:
                raise Died
            self.dies_after -= 1
        self._ahead_at[key] = self.ahead

    @property
    def url(self) -> str:
        return self.real.url

    def get(self, key: str) -> bytes:
        return self.real.get(key)

    def stream(self, key: str) -> Iterator[bytes]:
        return self.real.stream(key)

    def put(self, key: str, data: bytes | Path) -> None:
        self._change(key)
        self.real.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        before = self._ahead_at.get(key)
        self._change(key)
        won = self.real.create(key, data)
        if not won and before is not None:
            self._ahead_at[key] = before
        if self.loses_reply:
            self.loses_reply = False
            lose(key)
        return won

    def stat(self, key: str) -> ObjectInfo | None:
        found = self.real.stat(key)
        return found and self._now(found)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (self._now(info) for info in self.real.list(prefix))

    def delete(self, key: str) -> None:
        self._change(key)
        self.real.delete(key)

    def check(self, *, writes: bool = True) -> None:
        self.real.check(writes=writes)

    def _now(self, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(info.key, info.size, info.modified + self._ahead_at.get(info.key, 0.0))


@dataclass
class Modelled:
    """What the model knows of a version."""

    state: ModelState
    base: int | None
    checkpoint: str | None
    bad: bool = False


@dataclass
class Offer:
    """A staged version and the state that was staged."""

    staged: Staged
    state: ModelState
    checkpoint: str | None
    number: int | None = None


@dataclass
class Model:
    versions: dict[int, Modelled] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    """Epoch -> its head."""
    entries: int = 0
    pins: set[int] = field(default_factory=set)
    holds: dict[str, tuple[int, float]] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    """Versions that must come back."""
    unneeded_since: dict[int, float] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        return max(self.epochs)

    def line(self) -> list[int]:
        """Newest first."""
        found = []
        step: int | None = self.epochs[self.newest] if self.epochs else 0
        while step is not None:
            if not self._bad(step):
                found.append(step)
            step = self.versions[step].base
        return found

    def _bad(self, version: int) -> bool:
        step: int | None = version
        while step is not None:
            if self.versions[step].bad:
                return True
            step = self.versions[step].base
        return False

    def bases(self) -> list[int]:
        """What a trainer may open on."""
        named = [v for v in self.line() if self.versions[v].checkpoint][:2]
        return named if any(v.checkpoint for v in self.versions.values()) else [0]

    def accepts(self, staged: Staged) -> bool:
        on_head = staged.epoch == self.newest and staged.base == self.epochs[staged.epoch]
        return on_head and not self._bad(staged.base)

    def needed(self, now: float) -> set[int]:
        held = {version for version, until in self.holds.values() if until > now}
        return {0, self.line()[0], *self.bases(), *self.pins, *held}

    def collected(self, now: float) -> None:
        """A collection, whole or not, took place."""
        needed = self.needed(now)
        for version in sorted(self.alive):
            if version in needed:
                self.unneeded_since.pop(version, None)
            elif now - self.unneeded_since.setdefault(version, now) >= GRACE - 2:
                self.alive.discard(version)


def tiny(fill: int) -> ModelState:
    """Every byte is `fill`."""
    specs = [TensorSpec("a.weight", "BF16", (8, 4)), TensorSpec("b.weight", "F32", (3,)), TensorSpec("c.scale", "F16", ())]
    return {s.name: RawTensor(s, np.full(s.nbytes, fill, np.uint8)) for s in specs}


class StoreMachine(RuleBasedStateMachine):
    """Subclasses say which store."""

    def open_objects(self) -> tuple[ObjectStore, str]:
        """(a store, a run name that nobody uses)."""
        raise NotImplementedError

    @initialize(plans=PLANS)
    def begin(self, plans: list[tuple[int, bool, bool]]) -> None:
        real, run = self.open_objects()
        self.world, self.run = World(real), run
        self.model = Model()
        self.offers: list[Offer] = []
        self.log = Log(self.world, run)
        base = tiny(1)
        seed_base_state(self.world, self.log, base, {"config.json": b"{}"}, "test", None, None)
        self.model.versions[0] = Modelled(base, None, None)
        self.model.alive.add(0)
        self.publishers = [self._publisher() for _ in range(2)]
        self.model.entries = 1
        self.open(0)
        self.train(plans)

    def _publisher(self) -> PublisherCore:
        return PublisherCore(self.world, self.run, PublisherSettings())

    def _log(self) -> Log:
        self.log.refresh()
        return self.log

    def _now(self) -> float:
        return store_time(self.world, self.run)

    def _version(self, pick: int) -> int:
        numbers = sorted(self.model.versions)
        return numbers[pick % len(numbers)]

    @rule(pick=PICK)
    def open(self, pick: int) -> None:
        bases = [base for base in self.model.bases() if base in self.model.alive]
        if not bases:
            return
        base = bases[pick % len(bases)]
        entry = self._log().append(logs.opened(base=base))
        assert entry.number == self.model.entries
        self.model.epochs[entry.number] = base
        self.model.entries += 1

    @rule(
        pick=PICK, seed=PICK, full=st.booleans(), checkpoint=st.booleans(), dies_after=st.sampled_from([None, None, 0, 1, 2, 3])
    )
    def stage(self, pick: int, seed: int, full: bool, checkpoint: bool, dies_after: int | None) -> None:
        """By any epoch's trainer, fenced ones too, on that epoch's head."""
        epochs = sorted(self.model.epochs)
        epoch = epochs[-1] if pick % 3 else epochs[pick % len(epochs)]
        base = self.model.epochs[epoch]
        depth = self._log().lineage.depth(base) + 1
        name = keys.new_write_id() if checkpoint else None
        state = stepped(self.model.versions[base].state, seed, 0.2)
        self.world.dies_after = dies_after
        try:
            if name is not None:
                meta = checkpoints.CheckpointMeta(epoch=epoch, base=base, depth=depth, batch_cursor=0, step=depth, at=0.0)
                checkpoints.save(self.world, self.run, name, {"o.bin": b"o"}, meta)
            manifest = write_version(
                self.world, self.run, epoch=epoch, base=base, write_id=keys.new_write_id(),
                base_state=None if full else self.model.versions[base].state, new_state=state,
                facts=VersionFacts(depth=depth, step=depth, batch_cursor=0, checkpoint=name),
            )  # fmt: skip
        except Died:
            return
        finally:
            self.world.dies_after = None
        staged = Staged(
            epoch=epoch, base=base, write_id=manifest.write_id, folder=manifest.folder, manifest_digest=manifest.digest
        )
        self.offers.append(Offer(staged, state, name))

    @rule(plans=PLANS)
    def train(self, plans: list[tuple[int, bool, bool]]) -> None:
        """Some versions of the newest epoch, one after another, without a fault: (seed, with a checkpoint, anchored)."""
        for seed, checkpoint, anchor in plans:
            self.stage(1, seed, False, checkpoint, None)
            self.commit(0, seed % 2, "none")
            if anchor:
                self.anchor(0, True)

    @precondition(lambda self: self.offers)
    @rule(pick=PICK, which=st.integers(0, 1), fault=st.sampled_from(["none", "none", "lost", "dies before", "dies after"]))
    def commit(self, pick: int, which: int, fault: str) -> None:
        """A publisher hears of any staged version, old ones and committed ones too."""
        offer = self.offers[-1 - pick % min(len(self.offers), 4)]
        accepts = offer.number is None and self.model.accepts(offer.staged)
        if accepts and offer.staged.base not in self.model.alive:
            return  # the base's deltas are gone: nothing can be verified
        if fault == "dies before":
            self.world.dies_after = 0
        self.world.loses_reply = fault in ("lost", "dies after")
        try:
            verdict = self.publishers[which].decide(offer.staged)
        except Died:
            self.world.dies_after = None
            self.publishers[which] = self._publisher()
            return
        finally:
            self.world.dies_after = None
            self.world.loses_reply = False
        if fault == "dies after":
            self.publishers[which] = self._publisher()
            verdict = self.publishers[which].decide(offer.staged)
        if offer.number is not None:
            assert isinstance(verdict, Committed)
            assert verdict.number == offer.number
        elif accepts:
            assert isinstance(verdict, Committed)
            assert verdict.number == self.model.entries
            offer.number = verdict.number
            self.model.versions[verdict.number] = Modelled(offer.state, offer.staged.base, offer.checkpoint)
            self.model.epochs[offer.staged.epoch] = verdict.number
            self.model.alive.add(verdict.number)
            self.model.entries += 1
        else:
            assert not isinstance(verdict, Committed)

    @rule(pick=PICK, recorded=st.booleans())
    def anchor(self, pick: int, recorded: bool) -> None:
        line = [version for version in self.model.line() if version in self.model.alive]
        version = line[pick % min(len(line), 3)]
        record = upload_anchor(self.world, self.run, version, keys.new_write_id(), self.model.versions[version].state)
        if recorded:
            record_anchor(self.world, self.run, record)

    @rule(pick=PICK)
    def pin(self, pick: int) -> None:
        version = self._version(pick)
        try:
            pin(self.world, self._log(), Pin(version=version, name="me"), RULES)
        except MissingError:
            assert version not in self.model.alive
        else:
            self.model.pins.add(version)
            self.model.alive.add(version)
            self.model.unneeded_since.pop(version, None)

    @precondition(lambda self: self.model.pins)
    @rule(pick=PICK)
    def unpin(self, pick: int) -> None:
        version = sorted(self.model.pins)[pick % len(self.model.pins)]
        claims.remove_pin(self.world, self.run, version, "me")
        self.model.pins.discard(version)

    @rule(pick=PICK, reader=st.sampled_from(["r1", "r2"]), seconds=st.sampled_from([GRACE / 2, 3 * GRACE]))
    def hold(self, pick: int, reader: str, seconds: float) -> None:
        version = self._version(pick)
        if version not in self.model.alive or version in self.model.unneeded_since:
            return  # a hold promises nothing for what was given up already
        until = self._now() + seconds
        claims.put_hold(self.world, self.run, Hold(reader=reader, version=version, until=until))
        self.model.holds[reader] = (version, until)

    @rule(pick=PICK)
    def quarantine(self, pick: int) -> None:
        version = self._version(pick)
        if version == 0 or pick % 4:
            return
        fresh = not self.model._bad(version)
        entry = quarantine(self._log(), version, "bad")
        assert (entry is not None) == fresh
        if fresh:
            self.model.versions[version].bad = True
            self.model.entries += 1

    @rule(first=WAITS, second=WAITS)
    def collect_twice(self, first: float, second: float) -> None:
        """What nobody needs between the two is gone after the second, where the time was long enough."""
        self.collect(first, None)
        self.collect(second, None)

    @rule(seconds=WAITS, dies_after=st.sampled_from([None, 1, 2, 3]))
    def collect(self, seconds: float, dies_after: int | None) -> None:
        """After some time."""
        self.world.ahead += seconds
        now = self._now()
        self.world.dies_after = dies_after
        with contextlib.suppress(Died):
            done = collect(self.world, self._log(), RULES, now=now)
            assert not set(done.plan.lost) & self.model.alive
        self.world.dies_after = None
        self.model.collected(now)

    @rule(pick=PICK)
    def read(self, pick: int) -> None:
        """Any version comes back right, or not at all where it was given up; also on top of another one."""
        version, have = self._version(pick), self._version(pick // 7)
        self._read(self._log(), version, (have, self.model.versions[have].state) if pick % 2 else None)

    def _read(self, log: Log, version: int, have: tuple[int, ModelState] | None = None) -> None:
        try:
            state = materialize(self.world, log, version, have, threads=1)
        except (MissingError, UnavailableError):
            assert version not in self.model.alive
        else:
            assert same(state, self.model.versions[version].state)

    @invariant()
    def one_lineage(self) -> None:
        log = self._log()
        assert log.next_number == self.model.entries
        assert log.lineage.path() == self.model.line()[::-1]
        assert log.lineage.versions() == sorted(self.model.versions)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            log = Log(self.world, self.run)
            log.refresh()
            assert log.lineage.path() == self.model.line()[::-1]
            for version in sorted(self.model.alive):
                self._read(log, version)
