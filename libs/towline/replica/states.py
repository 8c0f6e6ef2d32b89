"""A replica's named states and the ways between them."""

from __future__ import annotations

import time
from typing import Literal

import structlog

from towline.errors import InvariantError

State = Literal["starting", "following", "preparing", "prepared", "activating", "serving", "failed", "draining"]

WAYS: dict[State, frozenset[State]] = {
    "starting": frozenset({"following", "draining"}),
    "following": frozenset({"preparing", "draining"}),
    "preparing": frozenset({"prepared", "serving", "following", "failed", "draining"}),
    "prepared": frozenset({"activating", "serving", "following", "draining"}),
    "activating": frozenset({"serving", "following", "failed", "draining"}),
    "serving": frozenset({"preparing", "following", "draining"}),
    "failed": frozenset({"serving", "following", "draining"}),
    "draining": frozenset(),
}
"""`following`: the LOG is read, nothing is served. `preparing`, `prepared` and `activating` go on serving the version before,
if there is one; `prepared` lasts where an open evaluation holds that one. `failed`: a version couldn't be served; the way on is
the last good one (`serving`) or, without one, `following`. `serving` ends there too where a pinned version is quarantined."""

_log = structlog.get_logger(__name__)


class StateMachine:
    """Where a replica is. `detail` says which version, or why."""

    def __init__(self) -> None:
        self.state: State = "starting"
        self.detail = ""
        self.since = time.time()

    def go(self, state: State, detail: str = "") -> None:
        """`InvariantError` where no way leads there."""
        if state not in WAYS[self.state]:
            raise InvariantError(f"a replica can't go from {self.state} to {state}", code="replica_state")
        _log.info("replica_state", frm=self.state, to=state, detail=detail)
        self.state, self.detail, self.since = state, detail, time.time()
