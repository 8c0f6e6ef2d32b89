"""Each role puts, reads and deletes its own objects and is refused everything else, by a real SeaweedFS that has the policies.

The tables are written by hand, not taken from the code. MinIO and AWS take the same documents; neither runs here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers import running
from towline.access.roles import ROLES
from towline.config import StoreSettings
from towline.errors import UsageError
from towline.local.servers import S3Server
from towline.store.honesty import prove
from towline.store.objects import ObjectStore, open_store

RUN, OTHER = "one", "other"
TRAINER, WORKER, REWARD, BUFFER, PUBLISHER, GATEWAY = "trainer", "rollout-worker", "reward", "buffer", "publisher", "gateway"
OPERATOR, VIEWER, GC, INIT = "operator", "viewer", "gc", "init"
SERVICES = {TRAINER, WORKER, REWARD, BUFFER, PUBLISHER, GATEWAY}

MAY_PUT: dict[str, set[str]] = {
    f"{RUN}/log/00000007.json": {TRAINER, PUBLISHER, OPERATOR},
    f"{RUN}/head.json": {PUBLISHER, OPERATOR},
    f"{RUN}/versions/00000001-00000000-abc/part-00000.safetensors": {TRAINER, OPERATOR},
    f"{RUN}/checkpoints/abc/model.bin": {TRAINER},
    f"{RUN}/fingerprints/00000001.json": {TRAINER},
    f"{RUN}/anchors/00000000.json": {TRAINER, PUBLISHER, OPERATOR},
    f"{RUN}/anchors/00000000/abc/model.safetensors": {TRAINER, PUBLISHER, OPERATOR},
    f"{RUN}/anchors/00000007/abc/model.safetensors": {PUBLISHER, OPERATOR},
    f"{RUN}/blobs/ab": SERVICES | {OPERATOR},
    f"{RUN}/idempotency/ab": {GATEWAY},
    f"{RUN}/sessions/ab": {GATEWAY},
    f"{RUN}/tombstones/versions/x.json": {GC},
    f"{RUN}/pins/00000001-mine.json": {OPERATOR},
    f"{RUN}/holds/reader.json": {OPERATOR},
    f"{RUN}/clock": {GC, OPERATOR},
    f"{RUN}/anything": set(),
    f"{OTHER}/log/00000007.json": set(),
    f"{OTHER}/blobs/ab": set(),
    "towline-check": (SERVICES | {OPERATOR, GC, INIT}),
}
MAY_DELETE: dict[str, set[str]] = {
    f"{RUN}/log/00000007.json": set(),
    f"{RUN}/head.json": set(),
    f"{RUN}/versions/00000001-00000000-abc/part-00000.safetensors": {GC},
    f"{RUN}/checkpoints/abc/model.bin": {GC},
    f"{RUN}/anchors/00000000.json": set(),
    f"{RUN}/anchors/00000000/abc/model.safetensors": set(),
    f"{RUN}/anchors/00000007/abc/model.safetensors": {GC},
    f"{RUN}/blobs/ab": {BUFFER},
    f"{RUN}/idempotency/ab": {GATEWAY},
    f"{RUN}/sessions/ab": {GATEWAY},
    f"{RUN}/tombstones/versions/x.json": {GC, OPERATOR},
    f"{RUN}/pins/00000001-mine.json": {OPERATOR},
    f"{RUN}/holds/reader.json": {GC, OPERATOR},
    f"{OTHER}/blobs/ab": set(),
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from running(S3Server(tmp_path_factory.mktemp("guarded-s3"), runs=[RUN]))


@pytest.fixture(scope="module")
def admin(guarded: S3Server) -> ObjectStore:
    """Who may do everything, beside the roles."""
    state = guarded.state
    keys = {"access_key": state["access_key"], "secret_key": state["secret_key"]}
    return open_store(StoreSettings.model_validate({"url": "s3://towline", "endpoint": guarded.endpoint, **keys}))


def store_of(server: S3Server, role: str) -> ObjectStore:
    return open_store(server.settings(StoreSettings(role=role)))


def allowed(act: object, *arguments: object) -> bool:
    """False where the store refuses the permission; any other fault is a failed test."""
    assert callable(act)
    try:
        act(*arguments)
    except UsageError as error:
        if error.code != "store_permission":
            raise
        return False
    return True


@pytest.mark.parametrize("role", ROLES)
def test_a_role_puts_and_deletes_what_is_its_own_and_nothing_else(guarded: S3Server, admin: ObjectStore, role: str) -> None:
    store = store_of(guarded, role)
    assert {key for key in MAY_PUT if allowed(store.put, key, b"x")} == {key for key, who in MAY_PUT.items() if role in who}
    fresh = f"{RUN}/blobs/{role}"
    assert allowed(store.create, fresh, b"x") == (role in MAY_PUT[f"{RUN}/blobs/ab"])
    for key in MAY_DELETE:
        admin.put(key, b"x")
    found = {key for key in MAY_DELETE if allowed(store.delete, key)}
    assert found == {key for key, who in MAY_DELETE.items() if role in who}
    assert {key for key in MAY_DELETE if admin.stat(key) is None} == found


@pytest.mark.parametrize("role", ROLES)
def test_every_role_reads_its_run_and_no_other(guarded: S3Server, admin: ObjectStore, role: str) -> None:
    mine, theirs = f"{RUN}/versions/read/manifest.json", f"{OTHER}/versions/read/manifest.json"
    admin.put(mine, b"mine")
    admin.put(theirs, b"theirs")
    store = store_of(guarded, role)
    assert store.get(mine) == b"mine"
    assert mine in {info.key for info in store.list(f"{RUN}/versions/")}
    assert not allowed(store.get, theirs)
    store.check(writes=role != VIEWER)


def test_init_proves_that_the_store_keeps_its_word_and_leaves_nothing(guarded: S3Server, admin: ObjectStore) -> None:
    prove(store_of(guarded, INIT))
    assert {info.key for info in admin.list("towline-check")} <= {"towline-check"}


def test_keys_that_are_gone_are_one_clear_line(guarded: S3Server, tmp_path: Path) -> None:
    settings = guarded.settings(StoreSettings(role="trainer")).model_copy(update={"keys_folder": str(tmp_path)})
    with pytest.raises(UsageError, match=r"store\.keys_folder = '.*trainer\.s3-access': No such file"):
        open_store(settings)
