"""A client of the gateway over HTTP, async and sync: rollouts by a policy that the caller accepts, from one endpoint.

What they do is in operations.py, once; each class here only sends, waits and shows. For gRPC see grpc.py.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, assert_never

import httpx

from towline.client.operations import Ask, Call, Lost, Operations, Reply, Told
from towline.client.rules import Piece
from towline.client.steps import Flow, Next, Send, Show, Wait, lost

PATIENCE_SECONDS = 120.0
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""A whole answer may be so long in coming."""
P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    operation: Callable[Concatenate[Operations, P], Call[T]],
) -> Callable[Concatenate[AsyncGateway, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncGateway, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(operation(self._operations, *args, **kwargs))

    functools.update_wrapper(method, operation)
    return method


def _blocking(operation: Callable[Concatenate[Operations, P], Call[T]]) -> Callable[Concatenate[Gateway, P], T]:
    def method(self: Gateway, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(operation(self._operations, *args, **kwargs))

    functools.update_wrapper(method, operation)
    return method


def _async_pieces(
    operation: Callable[Concatenate[Operations, P], Flow[Ask, Piece, Told]],
) -> Callable[Concatenate[AsyncGateway, P], AsyncIterator[Piece]]:
    def method(self: AsyncGateway, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Piece]:
        return self._follow(operation(self._operations, *args, **kwargs))

    functools.update_wrapper(method, operation)
    return method


def _pieces(
    operation: Callable[Concatenate[Operations, P], Flow[Ask, Piece, Told]],
) -> Callable[Concatenate[Gateway, P], Iterator[Piece]]:
    def method(self: Gateway, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Piece]:
        return self._follow(operation(self._operations, *args, **kwargs))

    functools.update_wrapper(method, operation)
    return method


class AsyncGateway:
    """`async with AsyncGateway("http://…", token=…) as gateway`. `verify`: as httpx takes it, for a gateway with its own CA."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        model: str = "",
        patience_seconds: float = PATIENCE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        verify: Any = True,
    ) -> None:
        self._operations = Operations(token, patience_seconds, model)
        self._http = httpx.AsyncClient(base_url=url, timeout=_timeouts(silence_seconds), limits=_LIMITS, verify=verify)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    generate = _awaited(Operations.generate)
    stream = _async_pieces(Operations.stream)
    chat = _awaited(Operations.chat)
    open_session = _awaited(Operations.open_session)
    claim = _awaited(Operations.claim)
    turn = _awaited(Operations.turn)
    rollback = _awaited(Operations.rollback)
    finish = _awaited(Operations.finish)
    view_session = _awaited(Operations.view_session)
    delete_session = _awaited(Operations.delete_session)
    versions = _awaited(Operations.versions)
    wait_for_version = _awaited(Operations.wait_for_version)
    server_info = _awaited(Operations.server_info)
    post = _awaited(Operations.post)

    async def _run(self, steps: Call[T]) -> T:
        told: Told = None
        while True:
            try:
                step = steps.send(told)
            except StopIteration as end:
                found: T = end.value
                return found
            told = None
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            else:
                told = await self._asked(step.what)

    async def _asked(self, ask: Ask) -> Told:
        try:
            return _reply(await self._http.request(ask.method, ask.path, content=ask.body, headers=dict(ask.headers)))
        except httpx.TransportError as error:
            return _lost(error)

    async def _follow(self, flow: Flow[Ask, Piece, Told]) -> AsyncIterator[Piece]:
        told: Told = None
        response: httpx.Response | None = None
        lines: AsyncIterator[str] | None = None
        try:
            while True:
                try:
                    step = flow.send(told)
                except StopIteration:
                    return
                told = None
                match step:
                    case Show(piece):
                        yield piece
                    case Wait(seconds):
                        await asyncio.sleep(seconds)
                    case Send(ask):
                        if response is not None:
                            await response.aclose()
                        try:
                            response = await self._http.send(_request(self._http, ask), stream=True)
                            if response.status_code != 200:
                                await response.aread()
                                told = _reply(response)
                            else:
                                lines = response.aiter_lines()
                                told = await anext(lines, None)
                        except httpx.TransportError as error:
                            told = _lost(error)
                    case Next():
                        assert lines is not None
                        try:
                            told = await anext(lines, None)
                        except httpx.TransportError as error:
                            told = _lost(error)
                    case _:
                        assert_never(step)
        finally:
            if response is not None:
                await response.aclose()


class Gateway:
    """The same for callers without an event loop. Thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        model: str = "",
        patience_seconds: float = PATIENCE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        verify: Any = True,
    ) -> None:
        self._operations = Operations(token, patience_seconds, model)
        self._http = httpx.Client(base_url=url, timeout=_timeouts(silence_seconds), limits=_LIMITS, verify=verify)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    generate = _blocking(Operations.generate)
    stream = _pieces(Operations.stream)
    chat = _blocking(Operations.chat)
    open_session = _blocking(Operations.open_session)
    claim = _blocking(Operations.claim)
    turn = _blocking(Operations.turn)
    rollback = _blocking(Operations.rollback)
    finish = _blocking(Operations.finish)
    view_session = _blocking(Operations.view_session)
    delete_session = _blocking(Operations.delete_session)
    versions = _blocking(Operations.versions)
    wait_for_version = _blocking(Operations.wait_for_version)
    server_info = _blocking(Operations.server_info)
    post = _blocking(Operations.post)

    def _run(self, steps: Call[T]) -> T:
        told: Told = None
        while True:
            try:
                step = steps.send(told)
            except StopIteration as end:
                found: T = end.value
                return found
            told = None
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            else:
                told = self._asked(step.what)

    def _asked(self, ask: Ask) -> Told:
        try:
            return _reply(self._http.request(ask.method, ask.path, content=ask.body, headers=dict(ask.headers)))
        except httpx.TransportError as error:
            return _lost(error)

    def _follow(self, flow: Flow[Ask, Piece, Told]) -> Iterator[Piece]:
        told: Told = None
        response: httpx.Response | None = None
        lines: Iterator[str] | None = None
        try:
            while True:
                try:
                    step = flow.send(told)
                except StopIteration:
                    return
                told = None
                match step:
                    case Show(piece):
                        yield piece
                    case Wait(seconds):
                        time.sleep(seconds)
                    case Send(ask):
                        if response is not None:
                            response.close()
                        try:
                            response = self._http.send(_request(self._http, ask), stream=True)
                            if response.status_code != 200:
                                response.read()
                                told = _reply(response)
                            else:
                                lines = response.iter_lines()
                                told = next(lines, None)
                        except httpx.TransportError as error:
                            told = _lost(error)
                    case Next():
                        assert lines is not None
                        try:
                            told = next(lines, None)
                        except httpx.TransportError as error:
                            told = _lost(error)
                    case _:
                        assert_never(step)
        finally:
            if response is not None:
                response.close()


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def _timeouts(silence_seconds: float) -> httpx.Timeout:
    return httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS)


def _request(http: httpx.Client | httpx.AsyncClient, ask: Ask) -> httpx.Request:
    return http.build_request(ask.method, ask.path, content=ask.body, headers=dict(ask.headers))


def _reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.headers.get("retry-after"), response.content)


def _lost(error: httpx.TransportError) -> Lost:
    return Lost(lost(str(error) or type(error).__name__), sent=not isinstance(error, _UNSENT))
