"""The view of `towline up` says where the run is in a browser, once for each address."""

from __future__ import annotations

import io

from rich.console import Console

from towline.local.live import View
from towline.report.figures import FigureBook, Status
from towline.report.progress import progress_of


def gateway(replica: str, **figures: str) -> Status:
    return Status("gateway", replica, pid=7, port=1, ready=True, reason="", at=1.0, figures=dict(figures))


def test_the_views_address_is_said_once():
    said = io.StringIO()
    book = FigureBook()
    with View(Console(file=said, width=200), "t", {"gateway": 2}) as view:
        for url in ("http://127.0.0.1:1/ui/", "http://127.0.0.1:1/ui/", "http://127.0.0.1:2/ui/"):
            book.update([gateway("0", ui_url=url), gateway("1")])
            view.show(progress_of(book, steps=3, max_staleness=1), book)
    lines = [line for line in said.getvalue().splitlines() if "browser" in line]
    assert lines == ["the run in a browser: http://127.0.0.1:1/ui/", "the run in a browser: http://127.0.0.1:2/ui/"]
