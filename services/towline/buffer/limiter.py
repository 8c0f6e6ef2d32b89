"""Pacing as a rate limiter in Reverb's sense: samples per insert, with an error band. Pure arithmetic on one number.

Let `inserts` be what went in and `samples` what was taken out, ever. The limiter looks at how far the two are apart,

    diff = inserts * samples_per_insert - samples

and lets an insert happen while it leaves diff <= max_diff, a sample while it leaves diff >= min_diff. Whoever is ahead waits: a
consumer that stopped stops the producers once diff has reached max_diff, and nothing has to be thrown away for it. In the long
run both sides go at the pace of the slower one; what is under way never exceeds max_diff / samples_per_insert.

The buffer's items are groups. Each is trained once, so samples_per_insert is 1; a batch needs whole groups that are there, so
min_diff is 0; a group must still be within the bound when its turn comes, so max_diff is what the next 1 + max_staleness batches
take. A group that is dropped was never inserted. In Reverb's words: RateLimiter(samples_per_insert=1, min_size_to_sample=1,
min_diff=0, max_diff=max_diff).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limiter:
    """`ValueError` for a band in which neither side could ever move."""

    samples_per_insert: float
    min_diff: float
    max_diff: float

    def __post_init__(self) -> None:
        if not self.samples_per_insert > 0 or not self.max_diff >= self.min_diff:
            raise ValueError(f"{self}: needs samples_per_insert > 0 and max_diff >= min_diff")

    def insertable(self, diff: float) -> int:
        """How many items may be inserted now."""
        return max(0, math.floor((self.max_diff - diff) / self.samples_per_insert))

    def sampleable(self, diff: float) -> int:
        """How many items may be sampled now."""
        return max(0, math.floor(diff - self.min_diff))


def pacing(*, groups_per_batch: int, max_staleness: int, batches_left: int) -> Limiter:
    """The buffer's limiter, in groups: at the run's end fewer batches than the bound allows are left."""
    ahead = max(0, min(1 + max_staleness, batches_left))
    return Limiter(samples_per_insert=1, min_diff=0, max_diff=ahead * groups_per_batch)
