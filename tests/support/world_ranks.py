"""What each of three ranks does in the world's test: `world_ranks.py FOLDER`; it writes what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from towline.errors import FencedError, TowlineError, UsageError
from towline.learner.world import World, join_world


def caught(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except TowlineError as error:
        return [type(error).__name__, error.code, error.message]
    return []


def together(world: World, error: TowlineError | None) -> None:
    with world.together():
        if error is not None:
            raise error


def main() -> None:
    folder = Path(sys.argv[1])
    world = join_world("cpu")
    rank = world.rank
    found: dict[str, Any] = {"rank": rank, "size": world.size}
    found["broadcast"] = world.broadcast(b"abc" if rank == 0 else None).decode()
    found["empty"] = world.broadcast(b"" if rank == 0 else b"ignored").decode()
    found["from_2"] = world.broadcast(f"of {rank}".encode(), source=2).decode()
    found["all"] = [part.decode() for part in world.all_gather(b"x" * rank)]
    gathered = world.gather(str(rank).encode())
    found["gathered"] = None if gathered is None else [part.decode() for part in gathered]
    # Ranks 0 and 2 are one world, 1 is alone.
    part = world.split(rank % 2)
    found["part"] = [part.rank, part.size, [each.decode() for each in part.all_gather(str(rank).encode())]]
    found["part_from_last"] = part.broadcast(str(rank).encode(), source=part.size - 1).decode()
    channel = world.channel()
    found["channel"] = [channel.rank, len(channel.all_gather(b""))]
    found["sound"] = caught(world.agree)
    found["one_fails"] = caught(lambda: world.agree(FencedError("taken over", code="mine") if rank == 1 else None))
    found["agreed"] = world.agreed is not None
    found["two_fail"] = caught(lambda: together(world, UsageError(f"of {rank}") if rank else None))
    found["after"] = [part.decode() for part in world.all_gather(str(rank).encode())]
    world.timeout_seconds = 2.0
    hanging, dying = world.channel(), world.channel()
    if rank == 1:
        time.sleep(6.0)
    else:
        found["hangs"] = caught(hanging.barrier)[:2]
    if rank == 2:
        (folder / f"{rank}.json").write_text(json.dumps(found))
        os._exit(0)
    time.sleep(1.0)
    found["dead"] = caught(dying.barrier)[:2]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
