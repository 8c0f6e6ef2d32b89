"""Anchors behind the commits: every so many versions the newest one's whole state, so that a newcomer's chain stays short."""

from __future__ import annotations

import structlog

from towline import faults
from towline.delta.state import ModelState
from towline.errors import CorruptError
from towline.publisher.core import PublisherCore
from towline.store.anchors import has_anchor, record_anchor, upload_anchor
from towline.store.keys import new_write_id
from towline.store.objects import ObjectStore

_log = structlog.get_logger("towline.publisher")


class Anchorer:
    """`due` belongs in the thread that decides, `write` in any other beside it, one at a time."""

    def __init__(self, objects: ObjectStore, core: PublisherCore, every: int) -> None:
        self._objects = objects
        self._core = core
        self._every = every
        self._known: frozenset[int] | None = None
        self.written = 0

    @property
    def known(self) -> frozenset[int]:
        """Versions that have an anchor, as far as this publisher needs to know."""
        return self._known or frozenset()

    def due(self) -> tuple[int, ModelState] | None:
        """The own copy's version and state where it's time for its anchor; the state stays as it is."""
        log, version = self._core.log, self._core.copy.version
        if version is None or not log.lineage.on_line(version):
            return None
        if self._known is None:
            self._known = self._look()
        chain: int | None = version
        for _ in range(self._every):
            if chain is None or chain in self._known:
                return None
            chain = log.lineage.parent(chain)
        return version, self._core.copy.lend()

    def write(self, version: int, state: ModelState) -> None:
        """Upload the state as the version's anchor, and name it in the hint."""
        run = self._core.log.run
        anchor = upload_anchor(self._objects, run, version, new_write_id(), state)
        if anchor.model_digest != self._core.log.version(version).model_digest:
            raise CorruptError(f"run {run}: the publisher's own copy isn't version {version} any more", code="own_copy")
        faults.point("publisher.anchor_uploaded")
        record_anchor(self._objects, run, anchor)
        self._known = self.known | {version}
        self.written += 1
        self._core.log.write_hint(self.known)
        _log.info("anchored", version=version, nbytes=anchor.nbytes)

    def _look(self) -> frozenset[int]:
        """The anchors on the line within reach; those that the hint names beyond."""
        log = self._core.log
        hint = log.read_hint()
        recent = log.lineage.path()[-self._every :]
        wanted = {number for number in recent if number} | set(hint.anchors if hint else ())
        return frozenset({0}) | {number for number in wanted if has_anchor(self._objects, log.run, number)}
