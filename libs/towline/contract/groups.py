"""Group numbers on both sides of zero: from 0 up the buffer's, which it admits with tasks; below 0 external ones.

An external group comes from outside: somebody publishes whole trajectories under a number that they chose, and the buffer admits
them once all of its samples are scored. Everywhere a group is one integer; in subjects external group -17 is `ext-17`.
"""

from __future__ import annotations

import re

import xxhash

EXTERNAL = "external"
"""The lane of external samples: no task stands for them, and their `task_sequence` is 0."""
_TOKEN = re.compile(r"0|[1-9][0-9]{0,18}|ext-[1-9][0-9]{0,18}")
_MOST_EXTERNAL = 1 << 62


def is_external(group: int) -> bool:
    return group < 0


def external_group(name: str) -> int:
    """The number of the external group that its sender calls `name`: below 0, always the same, 62 bits of a hash."""
    return -1 - (xxhash.xxh3_64_intdigest(name.encode()) % _MOST_EXTERNAL)


def group_token(group: int) -> str:
    """The group in a subject: `17`, or `ext-17` for -17."""
    return str(group) if group >= 0 else f"ext{group}"


def parse_group(token: str) -> int | None:
    """The inverse of `group_token`; None for anything else."""
    if not _TOKEN.fullmatch(token):
        return None
    return -int(token[4:]) if token.startswith("ext-") else int(token)
