"""Which versions a replica has proved: what was sampled from one that failed doesn't count, and from one in proof it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


class Verdicts:
    """One version at a time is `begun`, then `judged`. Keeps a number for each version that was served."""

    def __init__(self) -> None:
        self._proved: set[int] = set()
        self._proving: tuple[int, asyncio.Future[bool]] | None = None

    def begin(self, version: int) -> None:
        """It's written into the engine, which may sample from it before it's proved."""
        self._proving = version, asyncio.get_running_loop().create_future()

    def judge(self, version: int, *, good: bool) -> None:
        """Its newest verdict, whatever an earlier one was."""
        (self._proved.add if good else self._proved.discard)(version)
        if self._proving is not None and self._proving[0] == version:
            self._proving[1].set_result(good)
            self._proving = None

    async def vouched(self, versions: Iterable[int]) -> bool:
        """Whether the engine proved each of these versions; waits while one is being proved."""
        for version in versions:
            if self._proving is not None and self._proving[0] == version:
                await asyncio.shield(self._proving[1])
            if version not in self._proved:
                return False
        return True
