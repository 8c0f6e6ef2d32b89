"""Who watches: screens, a browser's page, readers of single samples. Each works while its arm runs."""

from __future__ import annotations

import asyncio
import io
import random
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

import httpx
from loadtests.views.part import Part
from rich.console import Console, RenderableType

from towline.bundle.source import BusSource
from towline.bus.topology import CONTROL, STATUS
from towline.config import GatewaySettings
from towline.contract.control import BatchRecord, decode_control
from towline.errors import TowlineError
from towline.gateway.server import ApiServer
from towline.gateway.ui_routes import Ui, standing_alone
from towline.local.live import View
from towline.local.top import Look, Screen, watch
from towline.local.up import POLL_SECONDS
from towline.report.figures import FigureBook, decode_statuses
from towline.report.progress import progress_of
from towline.runtime.run_end import run_has_ended
from towline.trace.gather import trace
from towline.view.feed import BusFeed

PAGE_SECONDS = 2.0
"""Between two looks of the page (services/towline/gateway/ui/js/main.js)."""


class Views(Part):
    """Works while its arm runs; what it is at when the arm ends is broken off."""

    arm_of: ClassVar[str]

    async def work(self) -> None:
        self._on = asyncio.Event()
        self._at_work: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            for view in self.views():
                group.create_task(self._while_on(view))

    @abstractmethod
    def views(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]: ...

    def turn(self, arm: str) -> None:
        self.arm = arm
        if arm == self.arm_of:
            self._on.set()
        else:
            self._on.clear()
            for task in self._at_work:
                task.cancel()

    async def _while_on(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await self._on.wait()
            task = asyncio.create_task(work())
            self._at_work.add(task)
            await asyncio.wait([task])
            self._at_work.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, TowlineError):
                    raise error
                print(f"view: {error.message}", file=sys.stderr, flush=True)
                await asyncio.sleep(0.5)


class Screens(Views):
    """`towline top` and `towline up`'s live view, on screens that nobody sees."""

    arm_of = "screens"

    def views(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        self.counts = {"frames": 0.0}
        return self._top, self._live

    async def _top(self) -> None:
        counts = self.counts

        class Counted(Screen):
            def draw(self, look: Look) -> RenderableType:
                counts["frames"] += 1
                return Screen.draw(self, look)

        screen = Counted(self.run, self.settings.run.steps, self.settings.buffer.max_staleness, FigureBook())
        await watch(self.bus, screen, _console(), once=False)

    async def _live(self) -> None:
        """What `towline up` does besides starting processes."""
        book, settings = FigureBook(), self.settings
        with View(_console(), f"towline {self.run}", {"buffer": 1}) as view:
            while self._on.is_set():
                book.update(decode_statuses(await self.bus.kv(STATUS).items()))
                view.show(progress_of(book, steps=settings.run.steps, max_staleness=settings.buffer.max_staleness), book)
                await run_has_ended(self.bus, settings.run.steps)
                await asyncio.sleep(POLL_SECONDS)


class Web(Views):
    """`towline ui`, and a browser on its overview and its list of trajectories: each asks every two seconds, as the page does."""

    arm_of = "web"

    def views(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        self.counts = {"answers": 0.0, "ready": 0.0}
        self._ready = asyncio.Event()
        self._served: tuple[Ui, ApiServer] | None = None
        return self._serve, self._browser

    async def _serve(self) -> None:
        """What came while other arms ran is read before the window: a view that is open all the time has read it already."""
        if self._served is None:
            source = await BusSource.open(self.bus, self.objects, self.settings)
            app, ui = standing_alone(BusFeed(self.bus, source))
            self._served = ui, ApiServer(app, GatewaySettings(host="127.0.0.1", port=0))
            await self._served[1].start()
        ui = self._served[0]
        try:
            await ui.reading.refresh()
            self._ready.set()
            self.counts["ready"] = 1.0
            ui.reading.asked()
            await ui.run()
        finally:
            self._ready.clear()
            self.counts["ready"] = 0.0

    async def _browser(self) -> None:
        await self._ready.wait()
        assert self._served is not None
        known: dict[str, str] = {}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._served[1].port}/ui/api/", timeout=10.0) as client:
            while True:
                for question in ("overview", "curves", "trajectories?limit=50"):
                    headers = {"If-None-Match": known[question]} if question in known else {}
                    response = await client.get(question, headers=headers)
                    assert response.status_code in (200, 304), response.text
                    known[question] = response.headers.get("etag", "")
                    self.counts["answers"] += 1
                await asyncio.sleep(PAGE_SECONDS)


class Readers(Views):
    """Somebody who looks at one sample after the other (`towline trace`)."""

    arm_of = "readers"
    trace_seconds = 5.0

    def views(self) -> tuple[Callable[[], Coroutine[Any, Any, None]], ...]:
        self.counts = {"traces": 0.0, "trace_seconds": 0.0, "group": 0.0, "sample": 0.0}
        return (self._traces,)

    async def _traces(self) -> None:
        while self._on.is_set():
            began = time.monotonic()
            message = await self.bus.last(CONTROL, self.bus.topology.control("batch"))
            if message is not None and isinstance(record := decode_control(message.data), BatchRecord):
                row = random.choice(record.rows)
                source = await BusSource.open(self.bus, self.objects, self.settings)
                life = await trace(source, row.group, row.sample)
                assert life.batches, life.explanation
                self.counts |= {"traces": self.counts["traces"] + 1, "group": float(row.group), "sample": float(row.sample)}
                self.counts["trace_seconds"] += time.monotonic() - began
            await asyncio.sleep(max(self.trace_seconds - (time.monotonic() - began), 0.1))


def _console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=160, height=60)
