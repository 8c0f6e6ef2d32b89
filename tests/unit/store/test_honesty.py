"""A store that doesn't keep its word is refused where it's set up, before a log stands on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from towline.config import StoreSettings
from towline.errors import UsageError
from towline.store.file import FileStore
from towline.store.honesty import prove


class Forgetful(FileStore):
    """Takes the condition for granted on every key but the one that the quick check tries."""

    def create(self, key: str, data: bytes) -> bool:
        if key == "towline-check":
            return super().create(key, data)
        self.put(key, data)
        return True


class Overwriting(FileStore):
    """Answers rightly, and replaces the object all the same."""

    def create(self, key: str, data: bytes) -> bool:
        won = super().create(key, data)
        if not won:
            self.put(key, data)
        return won


class Clinging(FileStore):
    """Keeps what is deleted."""

    def delete(self, key: str) -> None:
        pass


def settings(folder: Path) -> StoreSettings:
    return StoreSettings(url=folder.as_uri())


def test_an_honest_store_passes_and_nothing_is_left(tmp_path: Path) -> None:
    store = FileStore(settings(tmp_path))
    prove(store)
    assert {info.key for info in store.list("")} <= {"towline-check"}


@pytest.mark.parametrize("kind", [Forgetful, Overwriting, Clinging])
def test_a_store_that_lies_is_refused(tmp_path: Path, kind: type[FileStore]) -> None:
    with pytest.raises(UsageError) as caught:
        prove(kind(settings(tmp_path)))
    assert caught.value.code == "store_lies"
