"""How far the run's streams may be purged: pure rules over the state, so that no restart misses what it needs.

A floor is the first sequence that stays. `final_depth` says up to which depth batches are final: the trainer goes back only to
a retained checkpoint of the line, of which the newest two stay. A snapshot record carries it, and applying that record makes
the state forget those batches' groups; so what the state still holds is open in the sense of docs/design/001-protocol.md, 8.

    CONTROL     min(newest snapshot's covers + 1, the batch of the oldest retained checkpoint, the oldest open group's first task)
    OUTCOME     the snapshot's outcome cursor + 1
    TRAJECTORY  min(reward's ack floor + 1, the first row of any group that is open or in a batch that isn't final;
                where reward compares a group's samples, the first one below that may still be scored: unscored.py)

Example: covers 900, checkpoints at depths 10 and 20, batch 9 at CONTROL 400, an open group from 350 on: CONTROL's floor is 350.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from towline.buffer.state import State

RETAINED_CHECKPOINTS = 2


@dataclass(frozen=True, slots=True)
class Floors:
    """The first sequence of each stream that stays."""

    control: int
    outcome: int
    trajectory: int


def final_depth(checkpoint_depths: Sequence[int]) -> int:
    """Batches below this depth can't be voided any more, given the depths of the line's checkpoints, newest first.

    While there is only one, the trainer may still find it unreadable, but never goes back to entry 0 (no_checkpoint).
    """
    retained = checkpoint_depths[:RETAINED_CHECKPOINTS]
    return min(retained, default=0)


def floors(state: State, *, covers: int, outcome_cursor: int, reward_floor: int | None) -> Floors:
    """`covers` and `outcome_cursor` are the newest readable snapshot's; `reward_floor` is reward's ack floor (None: unknown).

    The state must have taken in every outcome that stood when `reward_floor` was read: what reward has acknowledged since
    then may be scored without the state's knowing.
    """
    control = covers + 1
    trajectory = (reward_floor or 0) + 1
    if state.final_sequence:
        control = min(control, state.final_sequence)
    for group in state.groups.values():
        control = min(control, group.admitted_sequence)
    for group in (*state.groups.values(), *state.offers.values()):
        sequence = group.least_sequence()
        if sequence is not None and sequence < trajectory:
            trajectory = sequence
    return Floors(max(control, 1), outcome_cursor + 1, max(trajectory, 1))
