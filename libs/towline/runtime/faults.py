"""Places where a test may have the process die, as if by kill -9: between any two steps that a crash must not confuse.

`TOWLINE_FAULT` names one: `NAME`, `NAME#3` (the third time it's reached), `NAME@/path` (only if that file isn't there yet, and
it is made first: so a restarted process survives); several, with commas between them. Unset, a point costs a dictionary look-up.
"""

from __future__ import annotations

import os
import signal

from towline.errors import UsageError

VARIABLE = "TOWLINE_FAULT"
POINTS = {
    "trainer.seeded": "entry 0 stands; no epoch is open",
    "trainer.opened": "`open` stands in the LOG; nobody was told",
    "trainer.batch": "a batch and its rows are at hand; no step yet",
    "trainer.trained": "the step is done; nothing of it is stored",
    "trainer.before_checkpoint": "a version is due a checkpoint; nothing of it is stored",
    "trainer.checkpointed": "the checkpoint is whole in the store; its version isn't staged",
    "trainer.uploaded": "the version's parts and manifest are stored; nobody was told",
    "trainer.staged": "policy.staged was published; no entry was seen yet",
    "trainer.committed": "the version's entry was seen in the LOG",
    "publisher.received": "a staged record was taken from the bus; nothing was done about it",
    "publisher.verified": "the staged version was applied and every digest agrees; no entry yet",
    "publisher.committed": "the entry stands in the LOG; nobody was told",
    "publisher.hinted": "head.json was written; no message yet",
    "publisher.published": "policy.committed or policy.refused was published; staged isn't acknowledged yet",
    "publisher.acknowledged": "staged is acknowledged; the anchor that may be due isn't begun",
    "publisher.anchor_uploaded": "an anchor's files are uploaded; its record isn't",
}
"""Every point's name and what has happened there."""
_reached = dict.fromkeys(POINTS, 0)


def point(name: str) -> None:
    """Die here if `TOWLINE_FAULT` says so."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    _reached[name] += 1
    for fault in wanted.split(","):
        spec, _, marker = fault.partition("@")
        chosen, _, count = spec.partition("#")
        if chosen not in POINTS:
            raise UsageError(f"{VARIABLE} = {wanted!r}: no such point; there are {', '.join(POINTS)}", code="fault_point")
        if chosen == name and (not count or _reached[name] == int(count)) and (not marker or _mark(marker)):
            os.kill(os.getpid(), signal.SIGKILL)


def _mark(path: str) -> bool:
    """Make the file; False where it's there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
