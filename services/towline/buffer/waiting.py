"""Who waits for whom, and for how long: shares sampled while one buffer leads, ages of what stands in its queues."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice

from towline.buffer.admission import allowance
from towline.buffer.state import State
from towline.buffer.view import View

LOOKED_AT = 1000
"""Complete groups whose age is asked for: they're in the order in which they were completed."""


class Waiting:
    """`look` now and then; `figures` at any time."""

    def __init__(self) -> None:
        self.looks: Counter[str] = Counter()
        self._oldest_batch = -1
        self._since = 0.0
        self._room = self._band = 0

    def look(self, view: View) -> None:
        """While the run goes on and a trainer is there, who waits; and since when the oldest unconsumed batch has."""
        oldest = view.depth if view.depth < view.state.next_depth else -1
        if oldest != self._oldest_batch:
            self._oldest_batch, self._since = oldest, time.monotonic()
        self._band = round(view.pacing.max_diff)
        self._room = view.pacing.insertable(view.state.waiting_groups(view.depth))
        if view.finished or view.lineage.newest_epoch is None:
            return
        self.looks["all"] += 1
        self.looks["consumer_waiting"] += view.depth >= view.state.next_depth
        self.looks["producer_blocked"] += allowance(view) == 0 and len(view.state.complete) == len(view.state.open_train)

    @property
    def batch_seconds(self) -> float:
        """How long the oldest unconsumed batch has been waiting, as this process saw it; 0 without one."""
        return time.monotonic() - self._since if self._oldest_batch >= 0 else 0.0

    def figures(self, state: State) -> dict[str, float]:
        """Shares of this process's looks in which the trainer had no batch, and in which every group was in and none could be
        admitted; ages in seconds of the oldest open and the oldest complete group and of the oldest unconsumed batch; how many
        groups pacing lets under way, and how many more it had room for at the last look."""
        looks = max(self.looks["all"], 1)
        return {
            "consumer_waiting_share": self.looks["consumer_waiting"] / looks,
            "producer_blocked_share": self.looks["producer_blocked"] / looks,
            "oldest_open_seconds": _age(state, islice(state.open_train, 1)),
            "oldest_complete_seconds": _age(state, islice(state.complete, LOOKED_AT)),
            "oldest_batch_seconds": self.batch_seconds,
            "pacing_band_groups": self._band,
            "pacing_room_groups": self._room,
        }


def _age(state: State, numbers: Iterable[int]) -> float:
    """Of the oldest of these groups, since its admission; groups from outside, and those that a fork opened again, have none."""
    tasks = (state.groups[number].task for number in numbers)
    oldest = min((task.admitted_at for task in tasks if task is not None), default=None)
    return max(time.time() - oldest, 0.0) if oldest is not None else 0.0
