"""A trainer's part in a replay: each epoch's learner, its batches in order, and every version's weights compared with the LOG.

One rank's part, where a run had several: all of them make the same calls in the same order, each from its own copy of the source,
and all learn the same answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from towline.bundle.line import BatchAt, checkpoint_of
from towline.bundle.source import Source
from towline.config import Settings
from towline.contract.entries import BaseEntry, VersionEntry
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.errors import CorruptError, MissingError, TowlineError, UsageError
from towline.learner import fingerprint
from towline.learner.base import Learner, TrainBatch, pack_rows
from towline.learner.fingerprint import Fingerprint
from towline.learner.registry import ADVANTAGES, BACKENDS, look_up
from towline.learner.rows import Bound, Gathered, assemble, open_row
from towline.learner.sharing import Share, divide
from towline.learner.world import World
from towline.replay.compare import differing, distance
from towline.replay.report import EnvironmentDifferences, VersionResult
from towline.store import checkpoints
from towline.store.base import fetch_base_folder
from towline.store.lineage import Lineage
from towline.store.materialize import entry_manifest, materialize

DEVICE = "cpu"
Payloads = list[list[bytes | str]]
"""Of each batch's rows: the bytes, or why there are none."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch's learner was made. `differences` is None where the epoch recorded no fingerprint."""

    epoch: int
    differences: EnvironmentDifferences | None


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """A version, trained again."""

    result: VersionResult
    opened: Opened | None


class Again:
    """`prepare`, then `take` for each version of the line in order. All of it in one thread."""

    def __init__(
        self,
        source: Source,
        scratch: Path,
        start: int,
        changes: Mapping[str, Any],
        *,
        world: World | None = None,
        handed_over: Path | None = None,
        one_process: bool = False,
    ) -> None:
        """scratch: a folder that all ranks share. handed_over: what `leave` left of the versions before, instead of `start`'s
        checkpoint. one_process: whatever the layout of the run's ranks was."""
        self._source = source
        self._base = scratch / "base"
        self._scratch = scratch
        self._start = start
        self._changes = dict(changes)
        self._world = world or World()
        self._handed_over = handed_over
        self._one_process = one_process
        self._learner: Learner | None = None
        self._settings: Settings | None = None
        self._epoch: int | None = None
        self._lineage = Lineage()
        self._recorded: tuple[int, ModelState] | None = None

    def prepare(self) -> None:
        with self._world.together():
            if self._world.rank == 0:
                fetch_base_folder(self._source.objects, self._source.log, self._base)

    def take(self, entry: VersionEntry, batches: tuple[BatchAt, ...], payloads: Payloads) -> Taken:
        """Train the version's batches and compare."""
        opened = self._open(entry) if entry.epoch != self._epoch else None
        assert self._learner is not None
        # What the trainer knew of the LOG: nothing that came after this version.
        for number in range(self._lineage.next_number, entry.number):
            self._lineage.extend(self._source.log.entry(number))
        skipped, missing, reasons = [], 0, set()
        for batch, data in zip(batches, payloads, strict=True):
            gathered = self._gather(batch, data)
            missing += gathered.missing_rows
            reasons |= set(gathered.missing)
            trained = self._learner.train(self._batch(batch, gathered))
            if not trained.trained:
                skipped.append(batch.record.for_depth)
        notes = []
        if batches and batches[-1].sequence != entry.batch_cursor:
            notes.append(f"the LOG's batch cursor is {entry.batch_cursor}, its batch stands at {batches[-1].sequence}")
        if missing != entry.missing_rows:
            why = f" ({', '.join(sorted(reasons))})" if reasons else ""
            notes.append(f"the run trained without {entry.missing_rows} rows, this replay without {missing}{why}")
        if tuple(skipped) != entry.skipped:
            notes.append(f"the run skipped the steps {list(entry.skipped)}, this replay {skipped}")
        depths = tuple(batch.record.for_depth for batch in batches)
        return Taken(result=self._compare(entry, depths, self._learner.state(), tuple(notes)), opened=opened)

    def leave(self, folder: Path) -> None:
        """The learner's checkpoint, for other ranks to go on from."""
        assert self._learner is not None
        self._write(self._learner, folder)

    def _open(self, entry: VersionEntry) -> Opened:
        """The epoch's learner: as the trainer made it, from the state of the epoch's base."""
        settings, found = epoch_settings(self._source, entry.epoch, self._changes, one_process=self._one_process)
        backend: Any = look_up("trainer.backend", BACKENDS, settings.trainer.backend)
        arguments = (self._base, settings, settings.run.seed)
        error: TowlineError | None = None
        try:
            learner: Learner = backend(*arguments) if self._world.size == 1 else backend(*arguments, self._world)
        except UsageError as raised:  # of settings or model: every rank finds the same
            error = raised
        self._world.agree(error)
        if self._learner is not None:
            self._take_over(learner, entry.epoch)
        else:
            self._begin(learner)
        self._learner, self._settings, self._epoch = learner, settings, entry.epoch
        differences: EnvironmentDifferences | None = None
        if found is not None:
            differences = fingerprint.differences(found.environment, fingerprint.environment(DEVICE, settings.trainer.backend))
            differences |= _layout_differences(found, settings)
        return Opened(epoch=entry.epoch, differences=differences)

    def _take_over(self, learner: Learner, epoch: int) -> None:
        """From the last epoch's learner, as a restart does from its checkpoint."""
        assert self._learner is not None
        if self._world.size == 1:
            learner.restore(self._learner.checkpoint())
            return
        folder = self._scratch / f"epoch-{epoch}"
        self._write(self._learner, folder)
        self._restore(learner, FolderFiles(folder))

    def _begin(self, learner: Learner) -> None:
        """The start's weights, which must be the LOG's."""
        log, objects = self._source.log, self._source.objects
        if self._handed_over is not None:
            self._restore(learner, FolderFiles(self._handed_over))
            return
        name = checkpoint_of(log, self._start)
        if name is not None:
            files: Mapping[str, bytes] = {}
            with self._world.together(), _checkpoint_missing(self._source, self._start, name):
                files, _ = checkpoints.open_files(objects, log.run, name)
            self._restore(learner, files)
        entry = log.entry(self._start)
        assert isinstance(entry, BaseEntry | VersionEntry)
        if model_digest(self._digests(learner.state())) != entry.model_digest:
            raise CorruptError(
                f"{self._source.where}: the weights to start from aren't those of version {self._start}", code="base_state"
            )

    def _restore(self, learner: Learner, files: Mapping[str, bytes]) -> None:
        error: TowlineError | None = None
        try:
            learner.restore(files)
        except MissingError as raised:
            error = MissingError(
                f"version {self._start}: a file of its checkpoint isn't in {self._source.where}: {raised.message}",
                code="no_checkpoint",
            )
        except TowlineError as raised:
            error = raised
        self._world.agree(error)

    def _write(self, learner: Learner, folder: Path) -> None:
        """Each rank's own files."""
        files = learner.checkpoint()
        with self._world.together():
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                (folder / name).write_bytes(data)

    def _gather(self, batch: BatchAt, payloads: list[bytes | str]) -> Gathered:
        assert self._settings is not None
        assert self._learner is not None
        opened = [open_row(row, data) for row, data in zip(batch.record.rows, payloads, strict=True)]
        return assemble(
            batch.record,
            opened,
            advantage=look_up("trainer.advantage", ADVANTAGES, self._settings.trainer.advantage),
            vocabulary=self._learner.vocabulary,
            lineage=self._lineage,
            bound=Bound.of(self._settings),
        )

    def _batch(self, batch: BatchAt, gathered: Gathered) -> TrainBatch:
        """This rank's rows, divided as the trainer divides them."""
        assert self._learner is not None
        record, place = batch.record, self._learner.place
        if place.count == 1:
            return pack_rows(record.for_depth, gathered.rows)
        mine = divide([row.policy_tokens for row in record.rows], place.count)[place.index]
        keys = {(record.rows[number].group, record.rows[number].sample) for number in mine}
        own = [number for number, row in enumerate(gathered.rows) if (row.group, row.sample) in keys]
        share = Share(
            mine=np.array(own, np.int64),
            advantages=np.array([row.advantage for row in gathered.rows], np.float32),
            policy_tokens=np.array([row.loss_mask.sum(dtype=np.int64) for row in gathered.rows], np.int64),
        )
        return pack_rows(record.for_depth, [gathered.rows[number] for number in own], share)

    def _digests(self, state: ModelState) -> dict[str, str]:
        """Every rank's tensors, each once."""
        own = tensor_digests(state)
        if self._world.size == 1:
            return own
        found: dict[str, str] = {}
        for part in self._world.all_gather(msgspec.json.encode(own)):
            found |= msgspec.json.decode(part, type=dict[str, str])
        return found

    def _compare(self, entry: VersionEntry, depths: tuple[int, ...], state: ModelState, notes: tuple[str, ...]) -> VersionResult:
        found = self._digests(state)
        digest = model_digest(found)
        equal = digest == entry.model_digest
        names: list[str] = []
        gap = None
        if not equal:
            try:
                names = differing(entry_manifest(self._source.objects, entry).digests(), found)
            except MissingError:
                notes += ("the version's manifest is gone: which tensors differ isn't known",)
            gap = self._distance(entry.number, state)
        return VersionResult(
            version=entry.number,
            depth=entry.depth,
            epoch=entry.epoch,
            batches=depths,
            equal=equal,
            recorded_digest=entry.model_digest,
            replayed_digest=digest,
            first_tensor=names[0] if names else None,
            differing_tensors=len(names),
            tensors=len(found),
            max_abs_diff=gap,
            notes=notes,
        )

    def _distance(self, version: int, state: ModelState) -> float | None:
        own: float | None = None
        with self._world.together(), contextlib.suppress(MissingError):
            recorded = materialize(self._source.objects, self._source.log, version, self._recorded)
            self._recorded = (version, recorded)
            own = distance(recorded, state).max_abs_diff
        told = self._world.all_gather(b"" if own is None else repr(own).encode())
        return max((float(gap) for gap in told if gap), default=None)


class FolderFiles(Mapping[str, bytes]):
    """A folder's files by name, each read when it's asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.name for path in self._folder.iterdir()))

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.iterdir())


def epoch_settings(
    source: Source, epoch: int, changes: Mapping[str, Any], *, one_process: bool = False
) -> tuple[Settings, Fingerprint | None]:
    """What the epoch trained with, as changed; its fingerprint. `UsageError` for a change that is none."""
    found = fingerprint.read(source.objects, source.settings.run.name, epoch)
    settings = source.settings if found is None else found.apply(source.settings)
    settings = changed(settings, {**changes, "trainer.device": DEVICE})
    if one_process:
        settings = settings.model_copy(update={"trainer": settings.trainer.alone()})
    if settings.trainer.backend not in BACKENDS:
        raise UsageError(f"trainer.backend = {settings.trainer.backend!r} can't be replayed; torch can", code="backend")
    return settings, found


def changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """`UsageError` for a key that isn't a setting, or a value that it can't have."""
    tree = settings.model_dump()
    for name, value in changes.items():
        section, _, key = name.partition(".")
        if not isinstance(tree.get(section), dict) or key not in tree[section]:
            raise UsageError(f"--set {name}: there is no such setting", code="override")
        tree[section][key] = value
    try:
        return Settings.model_validate(tree)
    except ValueError as error:
        raise UsageError(f"--set: {' '.join(str(error).splitlines()[:3])}", code="override") from None


def _layout_differences(found: Fingerprint, settings: Settings) -> EnvironmentDifferences:
    """How the ranks were laid out, and are here: another layout adds the same numbers in another order."""
    recorded = {name: found.settings.get("trainer", {}).get(name) for name in fingerprint.LAYOUT}
    here = {name: getattr(settings.trainer, name) for name in fingerprint.LAYOUT}
    pairs = {
        f"trainer.{name}": (str(recorded[name]), str(here[name]))
        for name in fingerprint.LAYOUT
        if recorded[name] is not None and recorded[name] != here[name]
    }
    if found.world != settings.trainer.ranks:
        pairs["world"] = (str(found.world), str(settings.trainer.ranks))
    return pairs


@contextlib.contextmanager
def _checkpoint_missing(source: Source, version: int, name: str) -> Iterator[None]:
    try:
        yield
    except MissingError as error:
        raise MissingError(
            f"version {version}: its checkpoint {name} isn't in {source.where}; export it with --checkpoint {version}",
            code="no_checkpoint",
        ) from error
