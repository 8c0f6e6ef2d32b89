"""Bit-exact replay: train the line again from its recorded batches, and compare every version's digest with the LOG.

It does what the trainer did and nothing else: entry 0's weights (or a checkpoint's), each epoch with the settings it recorded,
its batches in order, their rows by sequence and digest. An epoch that began with a restart begins with one here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from towline.bundle.line import BatchAt, Step, checkpoint_of, read_batches, steps
from towline.bundle.source import Source
from towline.bus.topology import TRAJECTORY
from towline.config import Settings
from towline.contract.entries import BaseEntry, VersionEntry
from towline.delta.state import ModelState, model_digest, tensor_digests
from towline.errors import CorruptError, InvariantError, MissingError, UsageError
from towline.learner import fingerprint
from towline.learner.base import Learner, pack_rows
from towline.learner.registry import ADVANTAGES, BACKENDS, look_up
from towline.learner.rows import Bound, Gathered, assemble, open_row
from towline.replay.compare import differing, distance
from towline.replay.report import VerifyReport, VersionResult
from towline.store import checkpoints
from towline.store.base import fetch_base_folder
from towline.store.lineage import Lineage
from towline.store.materialize import entry_manifest, materialize

DEVICE = "cpu"
Tell = Callable[[VersionResult], None]


async def verify(
    source: Source,
    *,
    start: int = 0,
    end: int | None = None,
    changes: dict[str, Any] | None = None,
    go_on: bool = False,
    tell: Tell = lambda result: None,
) -> VerifyReport:
    """Train versions `start` (0, or one with a checkpoint) to `end` (None: the line's latest) again.

    changes: "section.key" -> value, to see what another setting would have done. go_on: past the first difference, as it always
    does where the environment isn't the recorded one. `UsageError` or `MissingError` where it can't begin.
    """
    log = source.log
    last = log.lineage.latest if end is None else end
    planned = steps(log, await read_batches(source), start, last)
    report = VerifyReport(run=source.settings.run.name, start=start, end=last, planned=len(planned), changed=dict(changes or {}))
    # One thread for all of it: how many threads a math library uses is a property of the thread that asks.
    with TemporaryDirectory(prefix="towline-replay-") as scratch, ThreadPoolExecutor(1, "towline-replay") as pool:
        replay = _Replay(source, report, Path(scratch, "base"), changes or {})
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(pool, replay.prepare)
        for step in planned:
            if step.lost:
                lost = ", ".join(map(str, step.lost))
                report.stopped = (
                    f"version {step.entry.number}: CONTROL has no batch for depth {lost} any more; start from a later checkpoint"
                )
                break
            payloads = [await _payloads(source, batch) for batch in step.batches]
            try:
                result = await loop.run_in_executor(pool, replay.take, step, payloads)
            except InvariantError as error:
                report.stopped = f"version {step.entry.number}: {error.message}"
                break
            report.results.append(result)
            tell(result)
            if not result.equal and not go_on and report.comparable:
                break
    return report


async def _payloads(source: Source, batch: BatchAt) -> list[bytes | str]:
    messages = await source.get_many(TRAJECTORY, [row.sequence for row in batch.record.rows])
    return ["lost" if message is None else message.data for message in messages]


@dataclass(slots=True)
class _Replay:
    """The trainer's part; all of it in one thread."""

    source: Source
    report: VerifyReport
    folder: Path
    changes: dict[str, Any]
    _learner: Learner | None = None
    _settings: Settings | None = None
    _epoch: int | None = None
    _lineage: Lineage = field(default_factory=Lineage)
    _recorded: tuple[int, ModelState] | None = None

    def prepare(self) -> None:
        fetch_base_folder(self.source.objects, self.source.log, self.folder)

    def take(self, step: Step, payloads: list[list[bytes | str]]) -> VersionResult:
        """Train the step's batches and compare."""
        entry = step.entry
        if entry.epoch != self._epoch:
            self._open(entry)
        assert self._learner is not None
        # What the trainer knew of the LOG: nothing that came after this version.
        for other in self.source.log.entries()[self._lineage.next_number : entry.number]:
            self._lineage.extend(other)
        skipped, missing, reasons = [], 0, set()
        for batch, data in zip(step.batches, payloads, strict=True):
            gathered = self._gather(batch, data)
            missing += gathered.missing_rows
            reasons |= set(gathered.missing)
            trained = self._learner.train(pack_rows(batch.record.for_depth, gathered.rows))
            if not trained.trained:
                skipped.append(batch.record.for_depth)
        notes = []
        if step.batches and step.batches[-1].sequence != entry.batch_cursor:
            notes.append(f"the LOG's batch cursor is {entry.batch_cursor}, its batch stands at {step.batches[-1].sequence}")
        if missing != entry.missing_rows:
            why = f" ({', '.join(sorted(reasons))})" if reasons else ""
            notes.append(f"the run trained without {entry.missing_rows} rows, this replay without {missing}{why}")
        if tuple(skipped) != entry.skipped:
            notes.append(f"the run skipped the steps {list(entry.skipped)}, this replay {skipped}")
        return self._compare(step, self._learner.state(), tuple(notes))

    def _open(self, entry: VersionEntry) -> None:
        """The epoch's learner: as the trainer made it, from the state of the epoch's base."""
        source, run = self.source, self.source.settings.run.name
        found = fingerprint.read(source.objects, run, entry.epoch)
        settings = source.settings if found is None else found.apply(source.settings)
        settings = _changed(settings, {**self.changes, "trainer.device": DEVICE})
        settings = settings.model_copy(update={"trainer": settings.trainer.alone()})
        if settings.trainer.backend not in BACKENDS:
            raise UsageError(f"trainer.backend = {settings.trainer.backend!r} can't be replayed; torch can", code="backend")
        backend: Any = look_up("trainer.backend", BACKENDS, settings.trainer.backend)
        learner: Learner = backend(self.folder, settings, settings.run.seed)
        if self._learner is not None:
            learner.restore(self._learner.checkpoint())
        else:
            self._begin(learner)
        self._learner, self._settings, self._epoch = learner, settings, entry.epoch
        if found is None:
            self.report.unrecorded.append(entry.epoch)
        else:
            differences = fingerprint.differences(found.environment, fingerprint.environment(DEVICE))
            if found.world != fingerprint.WORLD:
                differences["world"] = (str(found.world), str(fingerprint.WORLD))
            self.report.environments[entry.epoch] = differences

    def _begin(self, learner: Learner) -> None:
        """The start's weights, which must be the LOG's."""
        log, start = self.source.log, self.report.start
        name = checkpoint_of(log, start)
        if name is not None:
            try:
                files, _ = checkpoints.load(self.source.objects, log.run, name)
            except MissingError as error:
                raise MissingError(
                    f"version {start}: its checkpoint {name} isn't in {self.source.where}; export it with --checkpoint {start}",
                    code="no_checkpoint",
                ) from error
            learner.restore(files)
        entry = log.entry(start)
        assert isinstance(entry, BaseEntry | VersionEntry)
        if model_digest(tensor_digests(learner.state())) != entry.model_digest:
            raise CorruptError(
                f"{self.source.where}: the weights to start from aren't those of version {start}", code="base_state"
            )

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

    def _compare(self, step: Step, state: ModelState, notes: tuple[str, ...]) -> VersionResult:
        entry = step.entry
        found = tensor_digests(state)
        digest = model_digest(found)
        equal = digest == entry.model_digest
        names: list[str] = []
        gap = None
        if not equal:
            try:
                names = differing(entry_manifest(self.source.objects, entry).digests(), found)
            except MissingError:
                notes += ("the version's manifest is gone: which tensors differ isn't known",)
            gap = self._distance(entry.number, state)
        return VersionResult(
            version=entry.number,
            depth=entry.depth,
            epoch=entry.epoch,
            batches=tuple(batch.record.for_depth for batch in step.batches),
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
        try:
            recorded = materialize(self.source.objects, self.source.log, version, self._recorded)
        except MissingError:
            return None
        self._recorded = (version, recorded)
        return distance(recorded, state).max_abs_diff


def _changed(settings: Settings, changes: dict[str, Any]) -> Settings:
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
