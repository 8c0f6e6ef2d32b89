"""Stores that fail in a chosen way, around a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from towline.errors import UnavailableError
from towline.store.objects import ObjectInfo, ObjectStore


class Faulty:
    """A real store, `before` and `after` whose creates something may happen, whose reads may be changed."""

    def __init__(self, real: ObjectStore) -> None:
        self.real = real
        self.before_create: Callable[[str], object] = lambda key: None
        self.after_create: Callable[[str], object] = lambda key: None
        self.creates: list[str] = []
        self.gets: list[str] = []
        self.change: dict[str, Callable[[bytes], bytes]] = {}

    @property
    def url(self) -> str:
        return self.real.url

    def get(self, key: str) -> bytes:
        self.gets.append(key)
        data = self.real.get(key)
        return self.change[key](data) if key in self.change else data

    def stream(self, key: str) -> Iterator[bytes]:
        return self.real.stream(key)

    def put(self, key: str, data: bytes | Path) -> None:
        self.real.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self.creates.append(key)
        self.before_create(key)
        won = self.real.create(key, data)
        self.after_create(key)
        return won

    def stat(self, key: str) -> ObjectInfo | None:
        return self.real.stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.real.list(prefix)

    def delete(self, key: str) -> None:
        self.real.delete(key)

    def check(self, *, writes: bool = True) -> None:
        self.real.check(writes=writes)


def once(then: Callable[[str], object]) -> Callable[[str], object]:
    """`then`, the first time only."""
    left = [then]

    def act(key: str) -> None:
        if left:
            left.pop()(key)

    return act


def lose(key: str) -> NoReturn:
    """The reply is lost."""
    raise UnavailableError(f"{key}: no answer", code="reply_lost")
