"""python -m loadtests.queues.ray_cluster ray|transferqueue FOLDER: Ray on this machine until standard input ends.

Prints one line of JSON: the address, the processes that hold messages, and how the system brings them back.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from loadtests.queues.ray_ends import NAME, NAMESPACE

CPUS = 4
"""That Ray's scheduler counts with: more than the actors ask for, so that none waits for another."""
STORE_BYTES = 1 << 30


def main(what: str, folder: str) -> None:
    ray.init(num_cpus=CPUS, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False, namespace=NAMESPACE,
             logging_level="error", _temp_dir=folder)  # fmt: skip
    told = _queue() if what == "ray" else _transfer_queue()
    print(json.dumps({"address": ray.get_runtime_context().gcs_address} | told), flush=True)
    sys.stdin.read()
    ray.shutdown()


def _queue() -> dict[str, Any]:
    """Its actor is started again by Ray where it's killed: as much as the queue's options can do."""
    from ray.util.queue import Queue

    queue = Queue(actor_options={"name": NAME, "num_cpus": 0, "max_restarts": -1, "lifetime": "detached"})
    return {"pids": [_pid(queue.actor)], "holders": "the queue's actor", "restart": "Ray starts it again (max_restarts)"}


def _transfer_queue() -> dict[str, Any]:
    import transfer_queue

    conf: Any = {"controller": {"polling_mode": True}}
    transfer_queue.init(conf)
    units = [ray.get_actor(f"TransferQueueStorageUnit#{number}") for number in range(2)]
    return {"pids": [_pid(unit) for unit in units], "holders": "the two storage units", "restart": "nothing starts them again"}


def _pid(actor: Any) -> int:
    found = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    assert isinstance(found, int)
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
