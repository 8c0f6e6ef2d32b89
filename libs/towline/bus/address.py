"""Addresses as they may be shown."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/\s@]+@")


def without_user(text: str) -> str:
    """The text with `user:password@` taken out of every URL in it."""
    return _USER.sub("", text)
