"""A request at work: its samples side by side, their text cut at stop strings, each step kept before anybody sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from towline.contract.task import VersionSpan
from towline.gateway.samples import Ask, Sample, SampleFinish, Sampler
from towline.gateway.text import Detokenizer, StopStrings


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How a request wants its text. `tokenizer` None: token IDs alone."""

    tokenizer: Any = None
    stops: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    keep_stop: bool = False
    kept: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that the text shows all the same."""


@dataclass(slots=True, eq=False)
class Choice:
    """One sample as its client may see it: the first `seen` tokens and `text`."""

    index: int
    ask: Ask
    sample: Sample
    wording: Wording
    seen: int = 0
    text: str = ""
    finish: SampleFinish | None = None
    matched: int | str | None = None
    """The stop token or stop string that ended it."""
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        wording = self.wording
        self._detokenizer = Detokenizer(wording.tokenizer, skip_special_tokens=wording.skip_special_tokens, kept=wording.kept)
        self._stops = StopStrings(wording.stops, keep=wording.keep_stop)

    def advance(self) -> None:
        """Take in what the sample has got. A stop string ends both with the token that completed it."""
        tokens, done = self.sample.tokens, self.sample.finish is not None
        if self.finish is not None:
            return
        if self.wording.tokenizer is None:
            self.seen = len(tokens)
        elif not self.wording.stops:
            self.text += self._detokenizer.more(tokens, last=done)
            self.seen = len(tokens)
        else:
            for count in range(self.seen + 1, len(tokens) + 1):
                last = done and count == len(tokens)
                self.text += self._stops.more(self._detokenizer.more(tokens[:count], last=last), last=last)
                self.seen = count
                if self._stops.matched is not None:
                    self.sample.drop_after(count)
                    self.sample.finish, self.matched, done = "stop", self._stops.matched, True
                    break
        if done:
            self.finish = self.sample.finish
            if self.finish == "stop" and self.matched is None and tokens:
                self.matched = tokens[-1]

    @property
    def spans(self) -> list[VersionSpan]:
        """Of the tokens that are seen."""
        return [
            VersionSpan(span.start, min(span.end, self.seen), span.version, span.cut)
            for span in self.sample.spans
            if span.start < self.seen
        ]

    @property
    def versions(self) -> tuple[int | None, int | None]:
        """Of its first and its last token that is seen."""
        spans = self.spans
        return (spans[0].version, spans[-1].version) if spans else (None, None)


class Job:
    """`events` once. `keep` is awaited with what is about to be seen."""

    def __init__(
        self,
        name: str,
        created: int,
        choices: list[Choice],
        sampler: Sampler,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name, self.created, self.choices = name, created, choices
        self._sampler, self._keep = sampler, keep

    @property
    def completion_tokens(self) -> int:
        return sum(choice.seen for choice in self.choices)

    async def events(self) -> AsyncGenerator[list[Choice], None]:
        """Choices that have something new, until all have their finish. Raises what the sampler raises."""
        dirty = {choice.index: choice for choice in self.choices if choice.sample.tokens or choice.sample.finish}
        news = asyncio.Event()
        if dirty:
            news.set()

        async def pump(choice: Choice) -> None:
            async with contextlib.aclosing(self._sampler.run(choice.ask, choice.sample)) as steps:
                async for _ in steps:
                    dirty[choice.index] = choice
                    news.set()
            dirty[choice.index] = choice

        pumps = {choice.index: asyncio.create_task(pump(choice)) for choice in self.choices if choice.sample.finish is None}
        for task in pumps.values():
            task.add_done_callback(lambda _: news.set())
        try:
            while any(choice.finish is None for choice in self.choices):
                await news.wait()
                news.clear()
                for task in pumps.values():
                    if task.done() and not task.cancelled():
                        task.result()
                batch, seen = [dirty[index] for index in sorted(dirty)], [len(choice.text) for choice in self.choices]
                dirty.clear()
                moved = []
                for choice in batch:
                    before = choice.seen
                    choice.advance()
                    if choice.finish is not None and (task_of := pumps.get(choice.index)) is not None:
                        task_of.cancel()
                    if choice.seen > before or choice.finish is not None or len(choice.text) > seen[choice.index]:
                        moved.append(choice)
                if moved:
                    if self._keep is not None:
                        await self._keep()
                    yield moved
        finally:
            for task in pumps.values():
                task.cancel()
            await asyncio.gather(*pumps.values(), return_exceptions=True)

    async def finished(self) -> None:
        """Until every choice has ended."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
