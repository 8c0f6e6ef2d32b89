"""What may go: a pure function of the LOG, what lies in the store, who wants what kept, and the time.

Nothing is deleted that isn't given up first: a tombstone, create-only, then a grace that is longer than the longest prepare,
then deletion. docs/design/011-retention.md gives the rules and why each crash and each race is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from towline.contract.entries import VersionEntry
from towline.store.claims import Hold, Standing
from towline.store.lineage import Lineage
from towline.store.log import Log

DEFAULT_GRACE_SECONDS = 3600.0

Kind = Literal["version", "anchor", "checkpoint"]
Action = Literal["keep", "condemn", "wait", "lift", "delete"]


@dataclass(frozen=True, slots=True)
class Rules:
    """How much stays."""

    grace_seconds: float = DEFAULT_GRACE_SECONDS
    """Longer than the longest prepare, upload of an anchor included."""
    anchors: int = 2
    """The line's newest ones, with the deltas from the oldest of them to the latest version."""
    checkpoints: int = 2
    """The line's newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """A folder of the store, the unit that goes: a version's representation, an anchor or a checkpoint."""

    kind: Kind
    folder: str
    keys: tuple[str, ...]
    """Its objects; the one that makes it whole first, so that what is half deleted isn't taken for whole."""
    nbytes: int
    oldest: float
    newest: float
    """When the store got the first and the last of its objects, by the store's clock."""
    complete: bool
    version: int | None = None
    """That it represents. None: uncommitted; of a checkpoint: always None."""
    stage: tuple[int, int] | None = None
    """(epoch, base) that it was made for, of what is uncommitted; None where nothing says."""
    recorded: bool = True
    """Of an anchor: its record names it."""
    given_up: float | None = None
    """When its tombstone was created, by the store's clock."""

    @property
    def name(self) -> str:
        return self.folder.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What lies in the store, as it was found at one time."""

    things: Sequence[Thing]
    pins: Sequence[Standing] = ()
    holds: Sequence[Hold] = ()
    opened_at: float | None = None
    """When the store got the newest `open`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a thing, and why."""

    thing: Thing
    action: Action
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    verdicts: list[Verdict]
    readable: dict[int, str]
    """Versions that stay readable whatever the plan does -> on whose account."""
    lost: dict[int, str]
    """Versions that should be readable and aren't -> why."""

    def of(self, action: Action) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.action == action]


def plan(log: Log, stock: Stock, rules: Rules, now: float) -> Plan:
    """What becomes of everything in `stock` at the time `now`, by the store's clock. The LOG must not be older than the stock's
    pins and holds; that it may be newer or older than the rest is harmless, since what can't commit never can again."""
    keeping = _Keeping(log, stock)
    if log.next_number:
        _keep_all(keeping, log, stock, rules, now)
    verdicts = []
    for thing in stock.things:
        reason = keeping.reasons.get(thing.folder)
        if reason is None:
            spared, why = _judge(thing, keeping, stock, rules, now)
            verdicts.append(Verdict(thing, *(("keep", why) if spared else _toward_deletion(thing, why, rules, now))))
        else:
            verdicts.append(Verdict(thing, "keep" if thing.given_up is None else "lift", reason))
    return Plan(verdicts, keeping.readable, keeping.lost)


def expired(thing: Thing, rules: Rules, now: float) -> bool:
    """Whether its tombstone has stood for the grace: any collector may delete it."""
    return thing.given_up is not None and now >= thing.given_up + rules.grace_seconds


def needs(log: Log, stock: Stock, version: int) -> list[Thing] | None:
    """What reading the version takes: the nearest start and the deltas after it. None where something of it is missing."""
    return _Keeping(log, stock).way(version)


@dataclass(slots=True)
class _Keeping:
    """Collects what stays."""

    log: Log
    stock: Stock
    reasons: dict[str, str] = field(default_factory=dict)
    """Folder -> why it stays; the first reason counts."""
    readable: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    anchors: dict[int, Thing] = field(init=False)
    deltas: dict[int, Thing] = field(init=False)
    checkpoints: dict[str, Thing] = field(init=False)
    naming: dict[str, list[int]] = field(init=False)
    """Checkpoint -> the versions that name it."""

    def __post_init__(self) -> None:
        self.naming = {}
        for entry in self.log.entries():
            if isinstance(entry, VersionEntry) and entry.checkpoint is not None:
                self.naming.setdefault(entry.checkpoint, []).append(entry.number)
        whole = [thing for thing in self.stock.things if thing.complete]
        self.anchors = {t.version: t for t in whole if t.kind == "anchor" and t.recorded and t.version is not None}
        self.deltas = {t.version: t for t in whole if t.kind == "version" and t.version is not None}
        self.checkpoints = {t.name: t for t in whole if t.kind == "checkpoint"}

    @property
    def lineage(self) -> Lineage:
        return self.log.lineage

    def way(self, version: int) -> list[Thing] | None:
        found: list[Thing] = []
        step: int | None = version
        while step is not None and step not in self.anchors:
            if step not in self.deltas:
                return None
            found.append(self.deltas[step])
            if self.log.version(step).representation == "full":
                return found
            step = self.lineage.parent(step)
        return None if step is None else [*found, self.anchors[step]]

    def read(self, version: int, reason: str) -> None:
        """The version stays readable."""
        if version in self.readable:
            return
        way = self.way(version)
        if way is None:
            self.lost.setdefault(version, reason)
            return
        self.readable[version] = reason
        self.keep(way, reason)

    def keep(self, things: Iterable[Thing | None], reason: str) -> None:
        for thing in things:
            if thing is not None:
                self.reasons.setdefault(thing.folder, reason)

    def chain(self, above: int, reason: str) -> None:
        """Every delta of the line above the version stays."""
        depth = self.lineage.depth(above)
        for version in self.lineage.path():
            if self.lineage.depth(version) > depth:
                self.keep([self.deltas.get(version)], reason)


def _keep_all(keeping: _Keeping, log: Log, stock: Stock, rules: Rules, now: float) -> None:
    lineage = log.lineage
    keeping.keep([keeping.anchors.get(0)], "the base model")
    keeping.read(0, "the base model")
    keeping.read(lineage.latest, "the latest version")
    newest = [version for version in reversed(lineage.path()) if version in keeping.anchors][: rules.anchors]
    for number in newest:
        keeping.keep([keeping.anchors[number]], f"one of the {rules.anchors} newest anchors")
    if newest:
        keeping.chain(newest[-1], f"in the chain of anchor {newest[-1]}")
    kept = 0
    for version in reversed(lineage.path()):
        name = _checkpoint(log, version)
        if kept < rules.checkpoints and name in keeping.checkpoints:
            kept += 1
            _keep_checkpoint(keeping, version, name, f"one of the {rules.checkpoints} newest checkpoints")
    for standing in stock.pins:
        version, reason = standing.pin.version, f"pinned: {standing.pin.name}"
        if version not in lineage:
            continue
        keeping.read(version, reason)
        name = _checkpoint(log, version)
        if name in keeping.checkpoints:
            _keep_checkpoint(keeping, version, name, reason)
    for hold in stock.holds:
        if hold.until > now and hold.version in lineage:
            reason = f"held by {hold.reader} until {hold.until:.0f}"
            keeping.read(hold.version, reason)
            if lineage.on_line(hold.version):
                keeping.chain(hold.version, reason)


def _keep_checkpoint(keeping: _Keeping, version: int, name: str, reason: str) -> None:
    keeping.keep([keeping.checkpoints[name]], reason)
    keeping.read(version, reason)


def _checkpoint(log: Log, version: int) -> str:
    entry = log.entry(version)
    return (entry.checkpoint or "") if isinstance(entry, VersionEntry) else ""


def _toward_deletion(thing: Thing, why: str, rules: Rules, now: float) -> tuple[Action, str]:
    if thing.given_up is None:
        return "condemn", why
    if not expired(thing, rules, now):
        return "wait", f"{why}; {thing.given_up + rules.grace_seconds - now:.0f} s of its grace are left"
    return "delete", why


def _judge(thing: Thing, keeping: _Keeping, stock: Stock, rules: Rules, now: float) -> tuple[bool, str]:
    """(whether it stays all the same, why) of a thing that nobody needs."""
    if thing.kind == "anchor":
        return _judge_anchor(thing, rules, now)
    if thing.kind == "version" and thing.version is not None:
        if not thing.complete and thing.given_up is None:
            return True, "a part of it is missing; restore it, nothing here is deleted"
        on_line = keeping.lineage.on_line(thing.version)
        return False, "before the oldest anchor that stays" if on_line else "off the line"
    if thing.kind == "checkpoint" and (named := keeping.naming.get(thing.name)):
        on_line = any(keeping.lineage.on_line(version) for version in named)
        return False, f"older than the {rules.checkpoints} newest checkpoints" if on_line else "of a version off the line"
    return _judge_stage(thing, keeping.lineage, stock)


def _judge_anchor(thing: Thing, rules: Rules, now: float) -> tuple[bool, str]:
    if thing.version == 0 and thing.recorded:
        return True, "the base model; a file of it is missing: restore it"
    if thing.recorded:
        return False, f"older than the {rules.anchors} newest anchors, or off the line" if thing.complete else "incomplete"
    if now - thing.newest <= rules.grace_seconds:
        return True, "an anchor that may be on its way"
    return False, "an anchor that was never finished"


def _judge_stage(thing: Thing, lineage: Lineage, stock: Stock) -> tuple[bool, str]:
    """Of what isn't committed: it goes once it can't be committed any more."""
    if thing.stage is None:
        # Without a manifest nothing says whose it is; but an upload that began before the newest epoch belongs to an older one.
        if stock.opened_at is None or thing.oldest >= stock.opened_at:
            return True, "an upload that may be on its way"
        return False, "begun before the newest epoch, and never finished"
    epoch, base = thing.stage
    if epoch == lineage.newest_epoch and base == lineage.epoch_head(epoch) and not lineage.quarantined(base):
        return True, "staged on the epoch's head: it may be committed"
    if lineage.newest_epoch is None or epoch > lineage.newest_epoch:
        return True, "of an epoch that isn't known here yet"
    return False, f"never committed, and can't be any more (epoch {epoch}, base {base})"
