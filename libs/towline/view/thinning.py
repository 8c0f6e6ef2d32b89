"""Fewer points of a long curve: neighbours become one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def buckets(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """At most `most` runs of neighbours, in order, as even as can be; none is empty."""
    if len(items) <= most:
        return [[item] for item in items]
    edges = [round(place * len(items) / most) for place in range(most + 1)]
    return [items[start:end] for start, end in pairwise(edges)]


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, evenly, the last one among them."""
    return [bucket[-1] for bucket in buckets(items, most)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
