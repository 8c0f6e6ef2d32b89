"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """`fault`: a run can't work so. `warning`: it works, and this will hurt. `remedy` says what to do, "" where all is well."""

    part: str
    state: Literal["ok", "warning", "fault"]
    what: str
    remedy: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def ok(part: str, what: str) -> Finding:
    return Finding(part, "ok", what)


def warning(part: str, what: str, remedy: str) -> Finding:
    return Finding(part, "warning", what, remedy)


def fault(part: str, what: str, remedy: str) -> Finding:
    return Finding(part, "fault", what, remedy)
