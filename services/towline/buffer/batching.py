"""The next batch: once per (epoch, for_depth), of whole groups, the stalest first.

`tidying` has dropped every group over the bound before this is asked, so what is complete may train. A batch may be formed
before the trainer has consumed the one before it; how far ahead, the bound on staleness says.
"""

from __future__ import annotations

from heapq import nsmallest

from towline.buffer.view import Unit, View
from towline.contract.control import BatchRecord, BatchRow
from towline.errors import InvariantError


def batch(view: View) -> list[Unit]:
    """The next batch if there are groups for it; nothing while no trainer has opened an epoch."""
    state, rules = view.state, view.rules
    depth = state.next_depth
    if view.lineage.newest_epoch is None or depth >= rules.steps or not state.complete:
        return []
    if len(state.complete) < rules.groups_per_batch and not _flush(view):
        return []
    effective = {version: view.lineage.effective_depth(version) for version in state.by_version}
    chosen = nsmallest(
        rules.groups_per_batch,
        (
            (min(effective[version] for version in state.groups[number].versions()), number)
            for number in state.complete
        ),
    )  # fmt: skip
    rows: list[BatchRow] = []
    for _, number in chosen:
        for index, scored in state.groups[number].rows():
            least = min(effective[version] for version in scored.versions)
            if depth - least > rules.max_staleness:
                raise InvariantError(f"sample {number}.{index} is over the bound: depth {least} for {depth}", code="over_stale")
            rows.append(BatchRow(number, index, scored.sequence, scored.digest, scored.reward, least, scored.policy_tokens))
    return [(BatchRecord(writer="", epoch=state.epoch, for_depth=depth, rows=tuple(rows), at=view.now),)]


def _flush(view: View) -> bool:
    """Whether the prompts have ended and every group is in: then a batch may be smaller, for there won't be more."""
    return view.out_of_data and len(view.state.complete) == len(view.state.open_train)
