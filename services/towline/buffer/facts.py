"""What the buffer knows of its run: facts that CONTROL and OUTCOME alone decide, all of which a snapshot keeps.

The count of `late` outcomes isn't one: a replay finds other outcomes late than the process that saw them come.
"""

from __future__ import annotations

from towline.buffer.groups import Batch, Group
from towline.buffer.totals import Totals
from towline.contract.control import EndRecord
from towline.contract.task import Cursor, Task


class Facts:
    """Readers may look at everything; only `State.apply` and `apply_outcome` change it."""

    def __init__(self) -> None:
        self.control_sequence = 0
        self.outcome_sequence = 0
        self.writer = ""
        self.next_group = 0
        self.cursor = Cursor(0, 0)
        """Of the newest train task: the next prompt to draw."""
        self.epoch = 0
        self.fork_depth = 0
        self.fork_sequence = 0
        self.floor_depth = 0
        """Batches below it are final: they and their groups are forgotten, but for the two facts that follow."""
        self.final = Totals()
        """Sums over the final batches."""
        self.final_sequence = 0
        """CONTROL sequence of the last of them; 0 before the first."""
        self.groups: dict[int, Group] = {}
        self.batches: dict[int, Batch] = {}
        """for_depth -> the batch that stands for it, from `floor_depth` on."""
        self.next_depth = 0
        """The depth that the next batch is for: batches follow each other, from the fork's depth on."""
        self.requeue: dict[int, Task] = {}
        """Dropped group -> its task: prompts to be admitted again, in order."""
        self.resampled = 0
        """Groups that were filtered or requeued since the newest batch or fork."""
        self.unjudged = 0
        """Groups of tasks that were dropped since their verifier failed, since the newest batch or fork."""
        self.scored_samples = 0
        """Scores in OUTCOME but for lane eval's, used or not."""
        self.scored_tokens = 0
        self.mixed_samples = 0
        """Of those, the ones whose tokens are of several versions."""
        self.admitted = 0
        """Samples, both lanes."""
        self.evaluated = 0
        self.dropped: dict[str, int] = {}
        self.evals: dict[int, tuple[int, float | None]] = {}
        """Version -> (depth, mean) of its closed evaluation."""
        self.eval_groups: dict[int, int] = {}
        """Version -> how many groups were ever issued for it; until its evaluation is closed."""
        self.eval_scores: dict[int, int] = {}
        self.newest_eval = -1
        self.ended: EndRecord | None = None
        """The end that stands: the newest one, unless a sample was admitted or a fork went below its depth after it."""
        self.late = 0
        """Outcomes that weren't used, as this process saw them (not a fact: a replay finds more of them late)."""
        self.offers: dict[int, Group] = {}
        """External groups that are neither admitted nor turned away, in the order of their first outcome."""
        self.refused: dict[int, str] = {}
        """Offer -> why it can't be admitted whatever comes: a final failure."""
        self.closed_external: dict[int, None] = {}
        """External groups that were dropped or turned away, or whose batch is final: an outcome of them is late."""
        self.turned_away: dict[str, int] = {}
        """Reason -> scored samples of offers that were dropped for it; they were never admitted."""
        self.requeued: dict[int, int] = {}
        """Dropped group -> the dead letter that it was requeued for, on somebody's request."""
