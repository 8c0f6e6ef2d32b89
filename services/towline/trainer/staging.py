"""One version in flight: checkpoint, diff against the committed baseline, upload, tell the publisher, and wait for the LOG.

All of it runs beside the next steps. The baseline advances on commit alone; a crash at any point leaves an orphan or a commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import structlog

from towline import faults, spans
from towline.bus.client import Bus
from towline.contract.codec import encode
from towline.contract.entries import VersionEntry
from towline.contract.policy import Staged
from towline.errors import FullError, InvariantError, TowlineError, UnavailableError
from towline.spans import Context, Span
from towline.store import checkpoints, versions
from towline.store.keys import new_write_id
from towline.store.objects import ObjectStore
from towline.trainer.crew import RANK_LOST, Crew
from towline.trainer.watch import LogWatch

RESEND_SECONDS = 5.0
"""How long neither an entry nor a refusal may take before `staged` is sent again."""
MAX_REFUSALS = 3
PATIENCE_SECONDS = 300.0
"""How long a store or a bus that is away is waited for, before this process gives the run up to its supervisor."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.5, 10.0

T = TypeVar("T")
log_line = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The policy between two steps, to be made a version; the ranks have its tensors."""

    facts: versions.VersionFacts
    checkpoint: bool
    """Whether they have the learner's files at this very moment too: the version is due a checkpoint."""
    steps: tuple[Context, ...] = ()
    """The spans of what was trained since the last snapshot."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A version that stands in the LOG, and how long its way there took."""

    entry: VersionEntry
    staged_seconds: float


class Stager:
    """Makes versions of one epoch out of snapshots, one at a time."""

    def __init__(self, bus: Bus, objects: ObjectStore, watch: LogWatch, crew: Crew, *, epoch: int, head: int) -> None:
        self.head = head
        """The epoch's last version: the base of the next."""
        self.trouble: str | None = None
        """A named state while something is waited for."""
        self._bus = bus
        self._objects = objects
        self._watch = watch
        self._crew = crew
        self._epoch = epoch

    async def stage(self, snapshot: Snapshot) -> Committed:
        """Until the version stands in the LOG.

        `FencedError` where another trainer took over; `InvariantError` (commit_failed) after `MAX_REFUSALS` refusals.
        """
        begun, begun_at = time.monotonic(), time.time()
        snapshot = await self._save_checkpoint(snapshot)
        for refusals in range(MAX_REFUSALS):
            upload_at = time.time()
            staged = await self._upload(snapshot)
            span = _stage_span(staged, snapshot, begun_at, upload_at)
            try:
                with span:
                    entry = await self._commit(staged, span.headers)
                    if span:
                        span.set(version=entry.number, wire_bytes=entry.wire_bytes, density=entry.density)
            except _Refused as refused:
                self._watch.check()
                self.trouble = "commit_failed"
                log_line.error("version refused", write_id=staged.write_id, reason=refused.reason, times=refusals + 1)
                continue
            self.trouble = None
            await asyncio.to_thread(self._crew.advance)
            self.head = entry.number
            faults.point("trainer.committed")
            return Committed(entry, time.monotonic() - begun)
        raise InvariantError(
            f"depth {snapshot.facts.depth}: the publisher refused the version {MAX_REFUSALS} times; see its log",
            code="commit_failed",
        )

    async def _save_checkpoint(self, snapshot: Snapshot) -> Snapshot:
        """Uploaded before the version is staged, so that the entry can name it."""
        if not snapshot.checkpoint:
            return snapshot
        name = f"{snapshot.facts.depth:08d}-{new_write_id()}"
        facts = snapshot.facts
        meta = checkpoints.CheckpointMeta(
            epoch=self._epoch, base=self.head, depth=facts.depth, batch_cursor=facts.batch_cursor, step=facts.step, at=time.time()
        )
        faults.point("trainer.before_checkpoint")
        records = await self._patiently(lambda: self._crew.save(name))
        await self._patiently(lambda: checkpoints.seal(self._objects, self._watch.log.run, name, records, meta))
        faults.point("trainer.checkpointed")
        return replace(snapshot, facts=msgspec.structs.replace(facts, checkpoint=name))

    async def _upload(self, snapshot: Snapshot) -> Staged:
        write_id = ""

        def write() -> versions.Manifest:
            nonlocal write_id
            write_id = new_write_id()  # a repeat is another write: what the first left behind is an orphan
            return self._crew.upload(self._epoch, self.head, write_id, snapshot.facts)

        manifest = await self._patiently(write)
        faults.point("trainer.uploaded")
        return Staged(
            epoch=self._epoch, base=self.head, write_id=write_id, folder=manifest.folder, manifest_digest=manifest.digest
        )

    async def _commit(self, staged: Staged, headers: dict[str, str] | None) -> VersionEntry:
        """Send `staged`, again while nothing comes of it, until the entry stands."""
        log = self._watch.log
        send_at, since = 0.0, time.monotonic()
        while True:
            change = self._watch.next_change()
            self._watch.check()
            entry = log.find(staged.write_id)
            if isinstance(entry, VersionEntry):
                return entry
            reason = self._watch.refusal(staged.write_id)
            if reason is not None:
                raise _Refused(reason)
            now = time.monotonic()
            if now >= send_at:
                await self._send(staged, headers)
                send_at = now + RESEND_SECONDS
            if now - since > 2 * RESEND_SECONDS:
                self.trouble = "commit_waits"
            await self._watch.wait(change, max(send_at - time.monotonic(), 0.01))

    async def _send(self, staged: Staged, headers: dict[str, str] | None) -> None:
        """A bus that is away or full isn't an error here: it is sent again."""
        try:
            await self._watch.read_refusal()
            if self._watch.refusal(staged.write_id) is None:
                await self._bus.publish(self._bus.topology.policy("staged"), encode(staged), headers=headers)
                faults.point("trainer.staged")
        except FullError:
            self.trouble = "bus_full"
        except UnavailableError as error:
            self.trouble = "bus_unavailable"
            log_line.warning("staged can't be sent", reason=error.message)

    async def _patiently(self, call: Callable[[], T]) -> T:
        """`call` in a thread, again while the store is away; each call's writes stand alone or under its own names."""
        give_up, wait = time.monotonic() + PATIENCE_SECONDS, FIRST_RETRY_SECONDS
        while True:
            try:
                result = await asyncio.to_thread(call)
            except UnavailableError as error:
                if error.code == RANK_LOST or time.monotonic() > give_up:
                    raise
                self.trouble = "store_unavailable"
                log_line.warning("the store is away", reason=error.message)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LAST_RETRY_SECONDS)
            else:
                self.trouble = None
                return result


def _stage_span(staged: Staged, snapshot: Snapshot, begun_at: float, upload_at: float) -> Span:
    """The version's first span: from the snapshot, through checkpoint and upload, to its commit."""
    tracer = spans.tracer
    if tracer is None:
        return spans.NOTHING
    own = spans.fixed_context(spans.version_trace(staged.write_id), spans.STAGE)
    span = tracer.start(spans.STAGE, None, kind="producer", own=own, links=snapshot.steps, at=begun_at)
    facts = snapshot.facts
    span.set(epoch=staged.epoch, base=staged.base, write_id=staged.write_id, depth=facts.depth, checkpoint=facts.checkpoint)
    tracer.start("version.upload", own, kind="client", at=upload_at).end()
    return span


class _Refused(TowlineError):
    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
