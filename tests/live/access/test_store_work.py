"""A run's life in the store: every part of it by the role whose it is, and refused to roles whose it isn't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live.store import logs, models
from support.servers import running
from towline.config import StoreSettings
from towline.errors import UsageError
from towline.local.servers import S3Server
from towline.store import checkpoints, keys
from towline.store.anchors import record_anchor, upload_anchor
from towline.store.blobs import Blobs
from towline.store.claims import Hold, Pin, put_hold
from towline.store.collect import collect, pin, store_time
from towline.store.log import Log
from towline.store.objects import ObjectStore, open_store
from towline.store.quarantine import quarantine
from towline.store.retention import Rules
from towline.store.versions import materialize

RUN = "one"
RULES = Rules(grace_seconds=100.0, anchors=1, checkpoints=1)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from running(S3Server(tmp_path_factory.mktemp("working-s3"), runs=[RUN]))


def test_each_role_does_its_part_of_a_runs_life(guarded: S3Server) -> None:
    def by(role: str) -> ObjectStore:
        store = open_store(guarded.settings(StoreSettings(role=role)))
        store.check(writes=role != "viewer")
        return store

    def read(role: str) -> Log:
        log = Log(by(role), RUN)
        log.refresh()
        return log

    # The trainer brings the model, opens, checkpoints and stages; the publisher commits and writes anchors.
    trainer = models.begun(by("trainer"), RUN)
    publisher = by("publisher")
    for depth in range(1, 5):
        log = read("trainer")
        head, name = log.lineage.latest, keys.new_write_id()
        assert log.lineage.newest_epoch is not None
        meta = checkpoints.CheckpointMeta(
            epoch=log.lineage.newest_epoch, base=head, depth=depth, batch_cursor=0, step=depth, at=0.0
        )
        checkpoints.save(trainer.objects, RUN, name, {"optimiser.bin": b"state"}, meta)
        state = models.stepped(trainer.states[head], depth)
        staged = trainer.stage(state, checkpoint=name)
        number = Log(publisher, RUN).append(models.entry_of(staged)).number
        trainer.states[number] = state
        if depth in (2, 4):
            record_anchor(publisher, RUN, upload_anchor(publisher, RUN, number, keys.new_write_id(), state))
            Log(publisher, RUN).write_hint([0, number])
    first, last = (read("viewer").lineage.version_at_depth(depth) for depth in (1, 4))
    assert first is not None
    assert last is not None

    # A worker's replica follows, and writes blobs alone.
    worker = by("rollout-worker")
    assert models.same(materialize(worker, read("rollout-worker"), last, None), trainer.states[last])
    digest = Blobs(worker, RUN).put(b"a long trajectory")
    assert Blobs(by("buffer"), RUN).get(digest) == b"a long trajectory"
    for role in ("rollout-worker", "reward", "gateway", "buffer", "viewer", "gc"):
        with pytest.raises(UsageError, match="these S3 keys may not do that"):
            Log(by(role), RUN).append(logs.opened())
        with pytest.raises(UsageError, match="these S3 keys may not do that"):
            models.Run(by(role), read(role), dict(trainer.states)).stage(trainer.states[last])

    # The operator pins and judges; gc deletes what is left over, and what is held stays.
    now = store_time(by("operator"), RUN)
    assert pin(by("operator"), read("operator"), Pin(version=last, name="mine"), RULES, now=now)
    for role in ("publisher", "trainer", "viewer", "buffer", "operator"):
        with pytest.raises(UsageError, match="these S3 keys may not do that"):
            collect(by(role), read(role), RULES, now=now + 1000.0)
    held = Hold(reader="replica-w0", version=first, until=now + 1e9)
    for later in (1000.0, 2000.0):
        done = collect(by("gc"), read("gc"), RULES, now=now + later, holds=(held,))
    assert models.same(materialize(worker, read("rollout-worker"), first, None), trainer.states[first])
    for later in (3000.0, 4000.0):
        done = collect(by("gc"), read("gc"), RULES, now=now + later)
    assert done.deleted > 0
    assert models.same(materialize(worker, read("rollout-worker"), last, None), trainer.states[last])
    with pytest.raises(UsageError, match="these S3 keys may not do that"):
        put_hold(by("viewer"), RUN, held)
    assert quarantine(read("operator"), last, "bad") is not None
