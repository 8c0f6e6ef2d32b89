"""The learning rate by depth: linear warm-up times linear decay. A function of the depth alone, so a restart needs no state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """`peak` is reached after `warmup_steps` batches; at batch `steps` the decay has come to `final_share`."""

    peak: float
    warmup_steps: int
    steps: int
    final_share: float

    def at(self, depth: int) -> float:
        """The learning rate for the batch that makes `depth` (1 is the first); constant from `steps` on."""
        progress = min(depth / self.steps, 1.0)
        warmup = min(1.0, depth / self.warmup_steps) if self.warmup_steps else 1.0
        return self.peak * warmup * (1.0 - (1.0 - self.final_share) * progress)
