"""A long line between this machine's network and a network namespace: real IP packets, held back, some lost.

Two TUN devices, one on either side, and this program between them does to each packet what netem would: kernels without netem
have TUN. It runs as a process of its own (`python line.py NAMESPACE SUBNET DELAY_SECONDS LOSS`), as root; a line on its input is
a command: `cut`, `heal`; at the end of its input it takes the devices and the namespace away. The ends are SUBNET.1, here, and
SUBNET.2, there. A second way, SUBNET2.1 and SUBNET2.2 (the last part one higher), never fails: for who looks on.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1400
_MOST_WAITING = 20_000
"""Packets on their way each way; more are lost, as in any router."""


def tun(name: str) -> int:
    """A TUN device's file descriptor; it stays this one's wherever the device is moved."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def main(namespace: str, subnet: str, delay_seconds: float, loss: float) -> None:
    here, there = f"{namespace}h"[:15], f"{namespace}t"[:15]
    ip("netns", "add", namespace)
    try:
        ends = (tun(here), tun(there))
        ip("link", "set", there, "netns", namespace)
        for prefix, device, address in (((), here, f"{subnet}.1/24"), (("-n", namespace), there, f"{subnet}.2/24")):
            ip(*prefix, "addr", "add", address, "dev", device)
            ip(*prefix, "link", "set", device, "mtu", str(MTU), "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        beside = subnet.rpartition(".")[0] + f".{int(subnet.rpartition('.')[2]) + 1}"
        ip("link", "add", f"{here}v", "type", "veth", "peer", "name", f"{there}v", "netns", namespace)
        for prefix, device, address in (((), f"{here}v", f"{beside}.1/24"), (("-n", namespace), f"{there}v", f"{beside}.2/24")):
            ip(*prefix, "addr", "add", address, "dev", device)
            ip(*prefix, "link", "set", device, "up")
        print("up", flush=True)
        print(json.dumps(carry(ends, delay_seconds, loss)), flush=True)
    finally:
        ip("netns", "del", namespace)


def carry(ends: tuple[int, int], delay_seconds: float, loss: float) -> dict[str, int]:
    """Until the end of the input; packets carried, lost by chance, and lost while it was cut."""
    chance, cut = random.Random(1), False
    counts = {"carried": 0, "lost": 0, "cut": 0}
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    while True:
        now = time.monotonic()
        for side, queue in enumerate(waiting):
            while queue and queue[0][0] <= now:
                try:
                    os.write(ends[1 - side], queue.popleft()[1])
                    counts["carried"] += 1
                except OSError:
                    counts["lost"] += 1  # the device's own queue is full
        due = min((queue[0][0] for queue in waiting if queue), default=now + 1.0)
        ready, _, _ = select.select([*ends, 0], [], [], max(due - time.monotonic(), 0.0))
        if 0 in ready:
            command = os.read(0, 64).decode()
            if not command:
                return counts
            cut = command.split()[-1] == "cut"
        arrived = time.monotonic()
        for side, queue in enumerate(waiting):
            if ends[side] not in ready:
                continue
            for _ in range(256):
                try:
                    packet = os.read(ends[side], 65536)
                except BlockingIOError:
                    break
                if cut:
                    counts["cut"] += 1
                elif chance.random() < loss or len(queue) >= _MOST_WAITING:
                    counts["lost"] += 1
                else:
                    queue.append((arrived + delay_seconds, packet))
        if cut:
            for queue in waiting:
                counts["cut"] += len(queue)
                queue.clear()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
