"""A page's question, out of a URL: checked, with one line that says what is wrong and how it is to be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import get_args

from towline.bundle.states import STATES
from towline.contract.groups import parse_group
from towline.contract.trajectory import FinishReason
from towline.errors import UsageError
from towline.view.samples import SampleFilter

MOST_NUMBER = 2**53
"""What JavaScript's numbers hold."""


def limit(query: Mapping[str, str], usual: int) -> int:
    return whole(query, "limit", least=1, most=1000) or usual


def whole(query: Mapping[str, str], name: str, *, least: int = 0, most: int = MOST_NUMBER) -> int | None:
    """A number, or None where it isn't asked for."""
    text = query.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and least <= int(text) <= most):
        raise UsageError(f"{name}={text}: use a whole number from {least} to {most}", code="ui_query")
    return int(text)


def sample_filter(query: Mapping[str, str]) -> SampleFilter:
    """step, version and reward are FROM:TO, either of which may be left out; id is GROUP or GROUP.SAMPLE."""
    group, sample = _id(query.get("id", ""))
    return SampleFilter(
        before=whole(query, "before"), group=group, sample=sample, lane=query.get("lane") or None,
        state=_one_of(query, "state", STATES),  # type: ignore[arg-type]
        finish=_one_of(query, "finish", get_args(FinishReason)),
        steps=_whole_range(query, "step"), versions=_whole_range(query, "version"), reward=_range(query, "reward"),
    )  # fmt: skip


def sample_named(text: str) -> tuple[int, int]:
    group, sample = _id(text)
    if group is None or sample is None:
        raise UsageError(f"{text!r} names no sample: use GROUP.SAMPLE, as in 12.3", code="ui_query")
    return group, sample


def _id(text: str) -> tuple[int | None, int | None]:
    text = text.strip()
    if not text:
        return None, None
    token, dot, index = text.partition(".")
    group = parse_group(token) if len(token) <= 24 else None
    if group is None or (dot and not (index.isascii() and index.isdecimal() and len(index) <= 9)):
        raise UsageError(
            f"id={text[:40]}: use GROUP or GROUP.SAMPLE, as in 12.3 (ext-12.3 for one from outside)", code="ui_query"
        )
    return group, int(index) if dot else None


def _one_of(query: Mapping[str, str], name: str, known: tuple[str, ...]) -> str | None:
    text = query.get(name, "")
    if text and text not in known:
        raise UsageError(f"{name}={text[:40]}: use one of {', '.join(known)}", code="ui_query")
    return text or None


def _whole_range(query: Mapping[str, str], name: str) -> tuple[int, int] | None:
    found = _range(query, name)
    if found is None:
        return None
    low, high = (min(max(edge, -1.0), 2.0**31 - 1) for edge in found)
    return max(math.ceil(low), 0), math.floor(high)


def _range(query: Mapping[str, str], name: str) -> tuple[float, float] | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    low, colon, high = text.partition(":")
    try:
        first = float(low) if low else -math.inf
        last = (float(high) if high else math.inf) if colon else first
    except ValueError:
        first = last = math.nan
    if math.isnan(first) or math.isnan(last):
        raise UsageError(f"{name}={text[:40]}: use a number or FROM:TO, as in 0.5:1", code="ui_query")
    return first, last
