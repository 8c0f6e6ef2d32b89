"""Runs a verifier with a time limit for each call, many at once, on the event loop or in threads.

A thread can't be stopped from outside. One whose call ran over its time is given up: the caller gets its error at once, the
thread ends when its call does, and another takes its place. `stuck` counts those that haven't ended yet, so that a service
can restart before they eat the machine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

from towline.errors import VerifierError
from towline.verifiers.base import Verifier


class Runner:
    """`await run(argument)` gives what the verifier returns, or raises `VerifierError`.

    `concurrency` calls run at a time, each for at most `timeout_seconds` from its start. One event loop at a time.
    """

    def __init__(self, verifier: Verifier, *, timeout_seconds: float, concurrency: int) -> None:
        self.verifier = verifier
        self.timeout_seconds = timeout_seconds
        self._slots = asyncio.Semaphore(concurrency)
        self._idle: list[_Thread] = []
        self._stuck: set[_Thread] = set()

    @property
    def stuck(self) -> int:
        """Threads whose call ran over its time and still goes on."""
        self._stuck = {thread for thread in self._stuck if thread.is_alive()}
        return len(self._stuck)

    async def run(self, argument: Any) -> Any:
        async with self._slots:
            try:
                return await (self._on_loop(argument) if self.verifier.is_async else self._in_thread(argument))
            except _OverTime:
                raise VerifierError(
                    f"{self.verifier.name} ran over its {self.timeout_seconds:g} s", code="verifier_timeout"
                ) from None
            except VerifierError:
                raise
            except Exception as error:  # the user's code may raise anything; it becomes a named failure of this sample
                text = str(error).splitlines()[0] if str(error) else ""
                raise VerifierError(f"{self.verifier.name} raised {type(error).__name__}: {text}") from error

    def close(self) -> None:
        """Ends the idle threads; busy ones end after their call."""
        for thread in self._idle:
            thread.finish()
        self._idle.clear()

    async def _on_loop(self, argument: Any) -> Any:
        try:
            async with asyncio.timeout(self.timeout_seconds) as limit:
                return await self.verifier.call(argument)
        except TimeoutError:
            if limit.expired():
                raise _OverTime from None
            raise

    async def _in_thread(self, argument: Any) -> Any:
        thread = self._idle.pop() if self._idle else _Thread(self.verifier.call)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        thread.submit(argument, answer)
        timer = asyncio.get_running_loop().call_later(self.timeout_seconds, _expire, answer)
        try:
            result = await answer
        except (_OverTime, asyncio.CancelledError):
            thread.finish()
            self._stuck.add(thread)
            raise
        except BaseException:
            self._idle.append(thread)
            raise
        finally:
            timer.cancel()
        self._idle.append(thread)
        return result


class _OverTime(Exception):
    """The runner's own time-out, apart from a TimeoutError that the verifier raised itself."""


class _Thread:
    """A daemon thread (a stuck call must not keep the process alive) that runs one call after the other."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call
        self._inbox: queue.SimpleQueue[tuple[Any, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="verifier", daemon=True)
        self._thread.start()

    def submit(self, argument: Any, answer: asyncio.Future[Any]) -> None:
        self._inbox.put((argument, answer))

    def finish(self) -> None:
        self._inbox.put(None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _loop(self) -> None:
        while (work := self._inbox.get()) is not None:
            argument, answer = work
            try:
                result, error = self._call(argument), None
            except BaseException as raised:  # noqa: BLE001 — handed to the caller whole, SystemExit included
                result, error = None, raised
            loop = answer.get_loop()
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(_deliver, answer, result, error)


def _deliver(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    elif isinstance(error, Exception):
        answer.set_exception(error if not isinstance(error, StopIteration) else RuntimeError("the call raised StopIteration"))
    else:
        answer.set_exception(RuntimeError(f"the call raised {type(error).__name__}"))


def _expire(answer: asyncio.Future[Any]) -> None:
    if not answer.done():
        answer.set_exception(_OverTime())
