"""Who comes to a run's bus and store: one role for each service, and those of the people and jobs around them."""

from __future__ import annotations

from towline.errors import UsageError

TRAINER = "trainer"
WORKER = "rollout-worker"
REWARD = "reward"
BUFFER = "buffer"
PUBLISHER = "publisher"
GATEWAY = "gateway"
OPERATOR = "operator"
VIEWER = "viewer"
GC = "gc"
INIT = "init"

ROLES = {
    TRAINER: "trains, stages versions and checkpoints, opens epochs",
    WORKER: "generates samples, and is a replica: it follows the versions",
    REWARD: "scores samples",
    BUFFER: "writes CONTROL: tasks, batches, drops; purges what no restart needs",
    PUBLISHER: "commits versions to the LOG, writes anchors",
    GATEWAY: "serves requests and sessions, claims tasks for them",
    OPERATOR: "the command line: asks for dropped prompts again, quarantines, pins, imports; reads everything",
    VIEWER: "the command line: reads everything, changes nothing",
    GC: "`towline versions gc`: deletes from the store what nobody needs or holds",
    INIT: "makes the run's streams, buckets and consumers (`towline init`), once and after changed settings",
}
"""Role -> what it does."""
SERVICES = (TRAINER, WORKER, REWARD, BUFFER, PUBLISHER, GATEWAY)


def role_of(service: str) -> str:
    """The role of the service that calls itself so: `rollout_worker` is `rollout-worker`."""
    return service.replace("_", "-")


def checked(role: str) -> str:
    """The role, or `UsageError` with those that there are."""
    if role not in ROLES:
        raise UsageError(f"no role {role!r}; there are {', '.join(ROLES)}", code="role")
    return role
