"""Requests on a server: each is one stream, or several where one broke, was ended by SGLang or begun again."""

from __future__ import annotations

import asyncio
import contextlib
import time

from towline.engine.base import ActivationMode, GenerateRequest, Generation, GenerationFinish
from towline.engine.sglang.served import Served
from towline.engine.sglang.stream import Run, Stream
from towline.engine.sglang.supervisor import Supervisor
from towline.errors import EngineError, TowlineError, UnavailableError, UsageError

_FIRST_TOKEN_SECONDS = 10.0
_LOST_SECONDS = 0.25
_ABORT_RETRY_SECONDS, _ABORT_TRIES = 0.5, 20
_MOST_STREAMS = 20
_SETTLE_POLL_SECONDS = 0.01


class Generations:
    """The requests underway. `seeded`: the server draws by the samples' seeds."""

    def __init__(self, server: Supervisor, served: Served, *, seeded: bool) -> None:
        self.runs: dict[str, Run] = {}
        self._server, self._served, self._seeded = server, served, seeded
        self._streams: set[Run] = set()
        self._ending = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, budget: int) -> Generation:
        if request.request_id in self.runs:
            raise UsageError(f"request {request.request_id} runs already; give each an id of its own", code="request_twice")
        run = self.runs[request.request_id] = Run(request, budget, self._served.labels)
        try:
            while True:
                await self._admitted(run)
                if run.aborted.is_set():
                    return run.generation("abort")
                self._server.check()
                if (finish := await self._stream(run)) is not None:
                    return run.generation(finish)
                if run.streams >= _MOST_STREAMS:
                    raise EngineError(
                        f"request {request.request_id}: its stream broke {run.streams} times", code="engine_unreachable"
                    )
        finally:
            del self.runs[request.request_id]

    def abort(self, request_id: str) -> None:
        if (run := self.runs.get(request_id)) is not None and not run.aborted.is_set():
            run.aborted.set()
            self._abort_stream(run)

    def end(self) -> None:
        """What runs comes back as an abort once the server is gone."""
        self._ending = True
        for run in self.runs.values():
            run.aborted.set()

    async def settle(self, mode: ActivationMode) -> None:
        """Before a pause: `drain` lets streams end; `in_place` lets each get its first token, so that none begins on new
        weights with a cache of the old ones."""
        if mode == "drain":
            # Nothing else wakes this but the server's end, so it looks now and then.
            while self._streams and self._server.alive:  # noqa: ASYNC110
                await asyncio.sleep(_SETTLE_POLL_SECONDS)
        elif mode == "in_place":
            until = time.monotonic() + _FIRST_TOKEN_SECONDS
            while any(run.silent for run in self._streams) and time.monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(_SETTLE_POLL_SECONDS)
            for run in self._streams:
                if run.silent is not None:
                    run.silent.again = True
                    self._abort_stream(run)

    async def _admitted(self, run: Run) -> None:
        """Until streams may begin, or the run is aborted."""
        if not self._served.open.is_set():
            waits = [asyncio.ensure_future(self._served.open.wait()), asyncio.ensure_future(run.aborted.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def _stream(self, run: Run) -> GenerationFinish | None:
        """One stream to its end; how the request ends with it, None where it doesn't."""
        served, stream = self._served, run.begin(self._served.label)
        reason = "lost"
        self._streams.add(run)
        try:
            async with contextlib.aclosing(self._server.client.generate(run.body(seeded=self._seeded))) as answers:
                async for answer in answers:
                    stream.feed(answer, unchanged=served.open.is_set() and served.label == stream.label)
                    if (ended := answer["meta_info"].get("finish_reason")) is None:
                        run.tell()
                    else:
                        reason = str(ended["type"]) if ended["type"] != "abort" else f"abort: {ended.get('message')}"
        except UnavailableError:
            # The server's supervisor sees to it; until then each try ends here.
            await asyncio.sleep(_LOST_SECONDS)
        except asyncio.CancelledError:
            self._abort_stream(run)
            raise
        finally:
            self._streams.discard(run)
            run.end_stream()
        return run.finished(reason, again=stream.again)

    def _abort_stream(self, run: Run) -> None:
        if run.stream is not None:
            task = asyncio.create_task(self._insist_abort(run, run.stream), name="sglang-abort")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _insist_abort(self, run: Run, stream: Stream) -> None:
        """An abort that overtakes its request finds nothing to abort: repeat it until the stream has ended."""
        for attempt in range(_ABORT_TRIES):
            if self._ending or (attempt and run.stream is not stream):
                return
            with contextlib.suppress(TowlineError):
                await self._server.client.abort(stream.rid)
            await asyncio.sleep(_ABORT_RETRY_SECONDS)
