"""Places where a test may have the process die, as if by kill -9: between any two steps that a crash must not confuse.

`TOWLINE_FAULT` names one: `NAME`, `NAME#3` (the third time it's reached), `NAME@/path` (only if that file isn't there yet, and
it is made first: so a restarted process survives); several, with commas between them. `</path` takes what stands in that file
when a point is reached, if anything: so a process that runs can be told. Unset, a point costs a dictionary look-up.
"""

from __future__ import annotations

import os
import signal

from towline.errors import UsageError

VARIABLE = "TOWLINE_FAULT"
POINTS = {
    "buffer.before_writer": "everything was read; the buffer that leads now isn't fenced yet",
    "buffer.writer_appended": "CONTROL is this buffer's; it knows neither the LOG nor OUTCOME",
    "buffer.before_task": "groups are to be admitted; none of their tasks stands",
    "buffer.task_appended": "a group's tasks stand",
    "buffer.before_reissue": "a sample is to be asked for again; no record says so",
    "buffer.reissue_appended": "the second task of a sample stands",
    "buffer.before_batch": "a batch was decided; no record says so",
    "buffer.batch_appended": "the batch stands; the state doesn't know",
    "buffer.before_drop": "a group is to be dropped; no record says so",
    "buffer.drop_appended": "the drop stands; the state doesn't know",
    "buffer.before_requeue": "somebody asked for a dropped group's prompt again; no record says so",
    "buffer.requeue_appended": "the request stands; its prompt isn't admitted",
    "buffer.before_admit": "a score from outside is to be taken in; no record says so",
    "buffer.admit_appended": "the sample from outside is admitted",
    "buffer.before_cancel": "what a drop, re-issue or fork left running is to be cancelled; no record says so",
    "buffer.cancel_appended": "the cancel stands",
    "buffer.before_eval": "an evaluation is complete or out of time; no record says so",
    "buffer.eval_appended": "the evaluation is closed",
    "buffer.before_fork": "a new epoch was seen in the LOG; nothing of the older ones is void",
    "buffer.fork_appended": "the fork stands; nothing was tidied or batched for the new epoch",
    "buffer.snapshot_due": "the state is encoded; its blob isn't stored",
    "buffer.before_snapshot": "the state's blob is stored; no record names it",
    "buffer.snapshot_appended": "the snapshot stands",
    "buffer.before_end": "the run is over; no record says so",
    "buffer.end_appended": "`end` stands; nobody was told",
    "worker.task_taken": "a task was taken from its lane; nothing was done about it",
    "worker.generated": "the sample's tokens are there; its bytes aren't",
    "worker.before_publish": "the trajectory is encoded and was decoded; nothing of it is stored",
    "worker.trajectory_published": "the trajectory stands, this one or another's; the task isn't acknowledged",
    "worker.acknowledged": "the task of a trajectory is acknowledged",
    "worker.before_failure": "an attempt failed; nobody was told",
    "worker.failure_published": "the failure stands; the task isn't acknowledged",
    "replica.copy_begun": "a version isn't on this host yet; nothing of it is written",
    "replica.copy_partly": "some of a version's bytes are in a file of this host",
    "replica.copy_written": "all of a version's bytes are there and verified; the host's record doesn't say so",
    "replica.copy_recorded": "the host's record says that the copy is good; nobody has taken it yet",
    "replica.prepared": "a version's files are verified; the engine has the one before",
    "replica.activated": "the engine has the version's weights; nothing proves it yet",
    "replica.proved": "the version is served; no ack says so",
    "replica.acknowledged": "the ack stands",
    "reward.taken": "a trajectory was taken from the bus; nothing was done about it",
    "reward.verified": "the verifier answered, for a sample or a whole group; no score stands",
    "reward.published": "the score stands, or all of a group's; the trajectory isn't acknowledged",
    "reward.acknowledged": "a trajectory is acknowledged",
    "reward.before_failure": "a sample can't be scored and its message is in DEAD; no failure says so",
    "reward.failure_published": "the failure stands; the trajectory isn't acknowledged",
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
    "gateway.task_taken": "a task was taken from lane session; no session of it stands",
    "gateway.session_claimed": "the task's session stands; its client wasn't told",
    "gateway.turn_sampled": "a turn's tokens are there; the session doesn't have them",
    "gateway.turn_kept": "the session has the turn; its client wasn't told",
    "gateway.finish_marked": "the session is to be finished; nothing of it is published",
    "gateway.trajectory_published": "the session's trajectory stands; its task isn't acknowledged",
    "gateway.task_acknowledged": "the task of a finished session is acknowledged; the session doesn't say so",
    "gateway.finished": "the session is finished; its client wasn't told",
    "gateway.end_marked": "a claimed session is given up; nobody was told",
    "gateway.failure_published": "the failure of a claimed session stands; its task isn't acknowledged",
    "gateway.end_acknowledged": "the task of a session that was given up is acknowledged; the session doesn't say so",
}
"""Every point's name and what has happened there."""
_reached = dict.fromkeys(POINTS, 0)


def point(name: str) -> None:
    """Die here if `TOWLINE_FAULT` says so."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    if wanted.startswith("<"):
        wanted = _standing(wanted[1:])
    _reached[name] += 1
    for fault in filter(None, wanted.split(",")):
        spec, _, marker = fault.partition("@")
        chosen, _, count = spec.partition("#")
        if chosen not in POINTS:
            raise UsageError(f"{VARIABLE} = {wanted!r}: no such point; there are {', '.join(POINTS)}", code="fault_point")
        if chosen == name and (not count or _reached[name] == int(count)) and (not marker or _mark(marker)):
            os.kill(os.getpid(), signal.SIGKILL)


def _standing(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def _mark(path: str) -> bool:
    """Make the file; False where it's there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
