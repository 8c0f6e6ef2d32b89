"""Sums over batches: what the figures say of them, and all that is kept of the final ones."""

from __future__ import annotations

import msgspec

from towline.buffer.groups import Batch


class Totals(msgspec.Struct, array_like=True):
    """Of the batches that `add` was given; `Batch` says what each sum is of."""

    batches: int = 0
    samples: int = 0
    staleness: dict[int, int] = msgspec.field(default_factory=dict)
    """Depths -> how many samples."""
    tokens: int = 0
    token_staleness: int = 0
    over_samples: int = 0
    over_tokens: int = 0
    over_sample_tokens: int = 0
    over_most: int = 0
    """The greatest, not a sum."""

    def add(self, batch: Batch) -> None:
        """Count the batch in."""
        self.batches += 1
        self.samples += batch.samples
        for age, samples in batch.staleness.items():
            self.staleness[age] = self.staleness.get(age, 0) + samples
        self.tokens += batch.tokens
        self.token_staleness += batch.token_staleness
        self.over_samples += batch.over_samples
        self.over_tokens += batch.over_tokens
        self.over_sample_tokens += batch.over_sample_tokens
        self.over_most = max(self.over_most, batch.over_most)

    def copy(self) -> Totals:
        """Another one of the same sums."""
        found = msgspec.structs.replace(self)
        found.staleness = dict(self.staleness)
        return found
