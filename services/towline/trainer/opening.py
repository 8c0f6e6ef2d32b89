"""How a trainer starts: entry 0 if the LOG is empty, the newest good checkpoint on the line, and an `open` on its version.

docs/design/001-protocol.md, 2 and 3. Everything here may be killed at any point and done again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import structlog

from towline import faults
from towline.config import Settings, import_object
from towline.contract.entries import BaseEntry, LogEntry, OpenEntry, Probe, VersionEntry
from towline.delta.state import layout_digest, model_digest
from towline.errors import CorruptError, InvariantError, MissingError, UsageError
from towline.store import checkpoints, versions
from towline.store.keys import new_write_id
from towline.store.log import Log
from towline.store.manifest import TensorRecord
from towline.store.objects import ObjectStore
from towline.trainer.crew import Crew

PROBE_TOKENS = 32

log_line = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Opening:
    """An epoch that this process opened; the crew's learner is in exactly the state of its base."""

    entry: OpenEntry
    layout_digest: str


def seed(objects: ObjectStore, log: Log, settings: Settings) -> None:
    """Write entry 0 from `model.source` or `model.factory`, unless the LOG has one."""
    log.refresh()
    if log.next_number:
        return
    from towline.learner.export import convert_folder, locate
    from towline.learner.torch_model import CausalModel

    model = settings.model
    with TemporaryDirectory(prefix="towline-model-") as scratch:
        if model.factory is not None:
            source, revision = Path(scratch, "made"), None
            named = model.factory
            source.mkdir()
            line = import_object(model.factory, "model.factory")(source, settings.run.seed, **model.arguments)
            log_line.info("model made", factory=model.factory, how=line)
        else:
            named = model.source
            source, revision = locate(model.source, model.revision)
        folder = Path(scratch, "published")
        convert_folder(source, folder, model.publish_dtype)
        policy = CausalModel(folder, settings.trainer.device)
        tokens = probe_tokens(policy.vocabulary, settings.run.seed)
        probe = Probe(
            tokens=tokens,
            logprobs=tuple(policy.sequence_logprobs(tokens, None)),
            tolerance=settings.publisher.probe_tolerance,
        )
        versions.seed_base(objects, log, folder, named, revision, probe)
    faults.point("trainer.seeded")


def probe_tokens(vocabulary: int, seed: int) -> tuple[int, ...]:
    """The run's fixed tokens: any will do, since the probe compares two computations of one policy."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, vocabulary, PROBE_TOKENS))


def open_epoch(log: Log, crew: Crew, write_id: str | None = None) -> Opening:
    """Restore the newest good checkpoint on the line and append `open` on its version.

    Where another entry gets in between (the last commit of the epoch before, say) everything is decided anew. `InvariantError`
    (no_checkpoint) where checkpoints were committed and none on the line can be used.
    """
    write_id = write_id or new_write_id()
    log.refresh()
    _check_layout(log, crew.outline())
    while True:
        log.refresh()
        base, checkpoint = _restore(log, crew)
        outline = crew.outline()
        _check_weights(log, base, outline)
        try:
            entry = log.append(_builder(log.next_number, base, checkpoint, write_id))
        except _Overtaken:
            continue
        if not isinstance(entry, OpenEntry):
            raise InvariantError(f"log entry {entry.number} has this trainer's write ID and isn't its open", code="log_rule")
        faults.point("trainer.opened")
        crew.adopt()
        return Opening(entry, layout_digest(record.spec for record in outline))


class _Overtaken(Exception):
    """The LOG grew since the base was chosen."""


def _builder(number: int, base: int, checkpoint: str | None, write_id: str) -> Callable[[Log], LogEntry]:
    def build(log: Log) -> LogEntry:
        mine = log.find(write_id)
        if mine is not None:
            return mine
        if log.next_number != number:
            raise _Overtaken
        entry = log.entry(base)
        return OpenEntry(
            number=number,
            prev=log.head_digest,
            write_id=write_id,
            at=time.time(),
            base=base,
            base_digest=log.digest(base),
            depth=log.lineage.depth(base),
            batch_cursor=entry.batch_cursor if isinstance(entry, VersionEntry) else 0,
            checkpoint=checkpoint,
        )

    return build


def _restore(log: Log, crew: Crew) -> tuple[int, str | None]:
    """Bring the learner to the newest checkpoint on the line that can be read: (its version, its name)."""
    failed: list[str] = []
    for number, name in checkpoints.newest_on(log):
        entry = log.version(number)
        try:
            meta = crew.restore(name)
            if meta.depth != entry.depth:
                raise CorruptError(f"its depth is {meta.depth}, that of version {number} {entry.depth}", code="checkpoint")
            if _digest(crew.outline()) != entry.model_digest:
                raise CorruptError(f"its weights aren't those of version {number}", code="checkpoint")
        except (CorruptError, MissingError) as error:
            log_line.error("checkpoint can't be used", checkpoint=name, version=number, reason=error.message)
            failed.append(f"{name} ({error.message})")
            continue
        return number, name
    if any(isinstance(entry, VersionEntry) and entry.checkpoint is not None for entry in log.entries()):
        found = "; ".join(failed) or "none stands on the line"
        raise InvariantError(
            f"run {log.run}: no checkpoint can be used: {found}; restore one under checkpoints/, or fork the run",
            code="no_checkpoint",
        )
    return 0, None


def _check_layout(log: Log, outline: list[TensorRecord]) -> None:
    """The run's tensors are entry 0's for good: names, shapes and the published dtype."""
    base = log.entry(0)
    if isinstance(base, BaseEntry) and layout_digest(record.spec for record in outline) != base.layout_digest:
        raise UsageError(
            f"run {log.run}: the model's tensors aren't those of entry 0; model.publish_dtype must stay what the run began with",
            code="layout",
        )


def _check_weights(log: Log, base: int, outline: list[TensorRecord]) -> None:
    """The learner's weights must be the base's, bit for bit, or every delta would be wrong."""
    entry = log.entry(base)
    if not isinstance(entry, BaseEntry | VersionEntry):
        raise InvariantError(f"log entry {base} is no version to open on", code="log_rule")
    if _digest(outline) != entry.model_digest:
        raise CorruptError(f"run {log.run}: the learner's weights aren't those of version {base}", code="base_state")


def _digest(outline: list[TensorRecord]) -> str:
    return model_digest({record.name: record.digest for record in outline})
