"""State + lineage + time -> the records to append next. Pure: asked twice, it answers the same.

One kind of decision at a time, the one that the others depend on first; the caller appends it, applies it, and asks again
until there is none. So a crash between deciding and appending loses nothing: the restarted buffer decides it again.
"""

from __future__ import annotations

from towline.buffer.admission import admit
from towline.buffer.batching import batch
from towline.buffer.evaluations import close, issue
from towline.buffer.external import take_in, turn_away
from towline.buffer.state import State
from towline.buffer.tidying import tidy
from towline.buffer.view import Unit, View
from towline.contract.control import EndRecord, ForkRecord
from towline.errors import InvariantError, MissingError
from towline.store.lineage import Lineage


def decide(view: View) -> list[Unit]:
    """The next units, in order; empty when there is nothing to do until something happens or time passes."""
    if 0 not in view.lineage:
        return []  # no entry 0 yet: nothing could serve a task
    return fork(view) or _go_on(view)


def _go_on(view: View) -> list[Unit]:
    if view.depth > view.state.next_depth:
        raise InvariantError(
            f"the LOG has consumed {view.depth} batches, CONTROL holds {view.state.next_depth}: CONTROL lost its tail; "
            "restore the bus's storage, or fork a new run from a version",
            code="stream_regressed",
        )
    if view.finished:
        return []
    return tidy(view) or turn_away(view) or issue(view) or close(view) or batch(view) or take_in(view) or admit(view) or end(view)


def fork(view: View) -> list[Unit]:
    """The record that must stand before anything is batched for a new epoch."""
    epoch = view.lineage.newest_epoch
    if epoch is None or epoch <= view.state.epoch:
        return []
    base = view.lineage.epoch_base(epoch)
    depth = view.lineage.depth(base)
    if depth > view.state.next_depth:
        raise InvariantError(
            f"epoch {epoch} opens at depth {depth}, CONTROL holds {view.state.next_depth} batches: CONTROL lost its tail; "
            "restore the bus's storage, or fork a new run from a version",
            code="stream_regressed",
        )
    if depth < view.state.floor_depth:
        raise InvariantError(
            f"epoch {epoch} opens at depth {depth}, history below depth {view.state.floor_depth} is purged: open on a newer "
            "checkpoint, or fork a new run from the version",
            code="below_floor",
        )
    return [(ForkRecord(writer="", epoch=epoch, base=base, depth=depth),)]


def end(view: View) -> list[Unit]:
    """Everything is trained, evaluated or dropped: the run is over."""
    goal = view.goal
    if goal is None or view.state.open_train or view.state.eval_groups:
        return []
    return [(EndRecord(writer="", reason=goal, depth=view.depth),)]


def unknown_versions(state: State, lineage: Lineage) -> bool:
    """Whether a score names a version that the lineage hasn't: the LOG must be read again before `decide` judges it."""
    for version in {*state.by_version, *state.offered_by}:
        try:
            lineage.depth(version)
        except MissingError:
            return True
    return False
