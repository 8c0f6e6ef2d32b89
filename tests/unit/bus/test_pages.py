"""Subjects that come in pages."""

from __future__ import annotations

import asyncio
from typing import Any

from towline.bus.pages import paged_subjects


def test_pages_are_asked_for_to_the_end_also_where_the_stream_changes_meanwhile() -> None:
    told = [["a", "b"], ["b", "c"], ["c"]]  # one was taken away before each later page, so that what follows moved up
    asked: list[dict[str, Any]] = []

    async def ask(query: dict[str, Any]) -> dict[str, Any]:
        asked.append(query)
        return {"total": 5, "state": {"subjects": dict.fromkeys(told[len(asked) - 1], 1)}}

    assert asyncio.run(paged_subjects(ask, "x.>")) == {"a", "b", "c"}
    assert asked == [{"subjects_filter": "x.>", "offset": offset} for offset in (0, 2, 4)]


def test_a_stream_that_is_not_there_or_has_none_has_no_subjects() -> None:
    async def nothing(query: dict[str, Any]) -> None:
        return None

    async def empty(query: dict[str, Any]) -> dict[str, Any]:
        return {"total": 0, "state": {}}

    assert asyncio.run(paged_subjects(nothing, "x")) == asyncio.run(paged_subjects(empty, "x")) == set()
