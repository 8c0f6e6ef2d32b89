"""The progress on the screen: a table that redraws itself on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from towline.report.figures import FigureBook
from towline.report.progress import Progress, number, progress_line, size

LINE_SECONDS = 5.0
HISTORY = 48
"""Columns of the reward curves."""
_BLOCKS = "▁▂▃▄▅▆▇█"


class View:
    """Shows progress between `__enter__` and `__exit__`; `event` says a line besides.

    `services`: how many processes of each the run is to have, in the order in which they are shown.
    """

    def __init__(
        self, console: Console, title: str, services: Mapping[str, int], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._title = title
        self._services = services
        self._clock = clock
        self._started = clock()
        self._said_at = float("-inf")
        self._said = ""
        self._train: dict[int, float] = {}
        self._views: set[str] = set()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def event(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def show(self, progress: Progress, book: FigureBook) -> None:
        for status in book.latest("gateway"):
            if (url := status.figures.get("ui_url")) and url not in self._views:
                self._views.add(url)
                self.event(f"the run in a browser: {url}")
        if progress.reward_train is not None:
            self._train[progress.depth] = progress.reward_train
        if self._live is not None:
            self._live.update(self._table(progress, book), refresh=True)
            return
        line, now = progress_line(progress), self._clock()
        if now - self._said_at >= LINE_SECONDS and line != self._said:
            self._console.print(Text(f"{now - self._started:5.0f} s  {line}"), soft_wrap=True)
            self._said_at, self._said = now, line

    def _table(self, progress: Progress, book: FigureBook) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=progress.steps, completed=progress.depth, width=40)
        rows.add_row("step", Group(Text(f"{progress.depth} of {progress.steps}"), bar))
        evals = [(depth, mean) for _, depth, mean in book.one("buffer").get("evals") or [] if mean is not None]
        rows.add_row("reward, held-out", curve([mean for _, mean in evals], progress.reward_held_out))
        rows.add_row("reward, train", curve([self._train[depth] for depth in sorted(self._train)], progress.reward_train))
        rows.add_row("policy version", "-" if progress.version is None else str(progress.version))
        rows.add_row(
            "staleness", f"{progress.staleness_mean:.2f} mean, {progress.staleness_max:g} max, {progress.max_staleness} allowed"
        )
        rows.add_row("rollout", f"{progress.trajectories_per_s:.0f} trajectories/s, {progress.tokens_per_s:.0f} tokens/s")
        density = "" if progress.delta_density is None else f", {progress.delta_density:.0%} of the weights changed"
        rows.add_row("delta", f"{size(progress.delta_bytes)} a version{density}")
        rows.add_row("services", services_line(self._services, book, progress.restarts))
        rows.add_row("time", f"{self._clock() - self._started:.0f} s")
        return Group(Text(self._title, style="bold"), rows)


def services_line(expected: Mapping[str, int], book: FigureBook, restarts: int) -> Text:
    """How many processes of each service are ready: of those that are expected, and of those that were met besides."""
    text = Text()
    for service in dict.fromkeys([*expected, *book.services()]):
        entries = book.latest(service)
        ready, of = sum(status.ready for status in entries), max(expected.get(service, 0), len(entries))
        style = "green" if ready == of else "yellow"
        text.append(f"{service}{f' {ready}/{of}' if of > 1 else ''}  ", style=style)
    return text.append(f"restarts {restarts}", style="red" if restarts else "dim")


def curve(values: list[float], last: float | None) -> Text:
    """A bar for each value, 0 to 1 full scale (or to the largest), the newest on the right."""
    if len(values) > HISTORY:
        step = len(values) / HISTORY
        values = [values[min(int((index + 1) * step) - 1, len(values) - 1)] for index in range(HISTORY)]
    low, high = min([0.0, *values]), max([1.0, *values])
    bars = "".join(_BLOCKS[min(int((value - low) / (high - low) * len(_BLOCKS)), len(_BLOCKS) - 1)] for value in values)
    return Text.assemble((number(last), "bold"), " ", (bars, "cyan"))
