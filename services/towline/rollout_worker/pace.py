"""How many samples a worker has at a time: as many as its engine runs without letting them wait in its queue.

Additive increase, multiplicative decrease, on the time that samples waited in the engine (an engine's room depends on their
lengths, so its slots are only an upper bound). What waits there is withheld from workers that could begin it now, and begins
under an older policy than it might.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DECREASE = 0.75
INCREASE_SHARE = 1 / 16
"""Of the slots, at a time."""
QUEUE_SHARE = 0.1
"""Of the time that samples take: waiting less than this is nothing."""
LEAST_SAMPLES = 4
"""A verdict is of at least so many samples, and of as many as there are at a time."""


class Pace:
    """`limit` is between 1 and `slots`, where it begins. Only samples that were begun under the present limit judge it."""

    def __init__(self, slots: int, queue_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.slots, self._queue_seconds, self._clock = slots, slots, queue_seconds, clock
        self.queue_seconds_mean = 0.0
        """Of the samples of the last verdict."""
        self.tokens_per_second = 0.0
        """Of all samples together, in the time between the last two verdicts."""
        self._changed_at = self._judged_at = clock()
        self._queued = self._generated = 0.0
        self._samples = self._tokens = 0
        self._was_full = False

    def finished(self, *, begun_at: float, queue_seconds: float, generate_seconds: float, tokens: int, busy: int) -> None:
        """A sample's times, and how many the worker had as it finished, this one included."""
        self._tokens += tokens
        if begun_at < self._changed_at:
            return
        self._queued += queue_seconds
        self._generated += generate_seconds
        self._samples += 1
        self._was_full |= busy >= self.limit
        if self._samples >= max(LEAST_SAMPLES, self.limit):
            self._judge()

    def _judge(self) -> None:
        now, queue, took = self._clock(), self._queued / self._samples, self._generated / self._samples
        self.queue_seconds_mean = queue
        self.tokens_per_second = self._tokens / max(now - self._judged_at, 1e-9)
        before = self.limit
        if queue > max(self._queue_seconds, QUEUE_SHARE * took):
            self.limit = max(1, int(self.limit * DECREASE))
        elif self._was_full:
            self.limit = min(self.slots, self.limit + max(1, int(self.slots * INCREASE_SHARE)))
        if self.limit != before:
            self._changed_at = now
        self._judged_at = now
        self._queued = self._generated = 0.0
        self._samples = self._tokens = 0
        self._was_full = False
