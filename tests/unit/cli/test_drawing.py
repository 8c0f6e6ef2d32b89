"""A screen is painted once for each look at the run: one that repaints by itself takes CPU and shows nothing new."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from towline.local import top
from towline.local.live import View
from towline.local.top import Look, Screen
from towline.report.figures import FigureBook
from towline.report.progress import progress_of


class Paint(io.StringIO):
    """`pictures`: what was painted since the last question, by the word that each picture has once."""

    def pictures(self, word: str) -> int:
        found = self.getvalue().count(word)
        self.seek(0)
        self.truncate()
        return found


def terminal(paint: Paint) -> Console:
    return Console(file=paint, force_terminal=True, width=120, height=40)


async def test_top_paints_once_for_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looks = 0
    four = asyncio.Event()

    async def read_look(bus: object) -> Look:
        nonlocal looks
        looks += 1
        if looks == 4:
            four.set()
        return Look(1.0, [], [], {}, {})

    monkeypatch.setattr(top, "read_look", read_look)
    monkeypatch.setattr(top, "EVERY_SECONDS", 0.6)  # long enough for a terminal that repaints four times a second
    paint = Paint()
    screen = Screen("small", 3, 1, FigureBook(tmp_path / "figures.json"))
    watching = asyncio.create_task(top.watch(None, screen, terminal(paint), once=False))  # type: ignore[arg-type]
    await four.wait()
    pictures = paint.getvalue().count("towline small")
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert 3 <= pictures <= 4  # the fourth look may be on its way to the screen


async def test_the_live_view_paints_once_for_each_look():
    paint = Paint()
    book = FigureBook()
    progress = progress_of(book, steps=3, max_staleness=1)
    with View(terminal(paint), "a title", {"buffer": 1}) as view:
        for _ in range(3):
            view.show(progress, book)
            assert paint.pictures("a title") == 1
        await asyncio.sleep(0.6)
        assert paint.pictures("a title") == 0
        view.event("a line")
        assert "a line" in paint.getvalue()
