"""A client of the gateway, async and sync: rollouts by a policy that the caller accepts, from one endpoint.

A repeat is safe (see rules.py), so what passes by itself is repeated with a back-off for `patience_seconds`: lost connections,
409 WeightVersionNotReady, 429, 5xx with their Retry-After. A stream that breaks goes on where it broke.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from towline.client.rules import (
    Following,
    Generated,
    Patience,
    Piece,
    generate_body,
    headers,
    new_key,
    passes,
    read_answer,
    refusal,
)
from towline.errors import TowlineError, UnavailableError

PATIENCE_SECONDS = 120.0
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 600.0
"""A whole answer may be so long in coming."""


class AsyncGateway:
    """`async with AsyncGateway("http://…", token=…) as gateway`."""

    def __init__(
        self, url: str, *, token: str = "", patience_seconds: float = PATIENCE_SECONDS, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._token, self._patience_seconds = token, patience_seconds
        self._http = httpx.AsyncClient(base_url=url, timeout=_timeouts(silence_seconds), limits=_LIMITS)

    async def __aenter__(self) -> AsyncGateway:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        min_version: int | None = None,
        exact_version: int | None = None,
        wait_seconds: float = 0.0,
        session: str | None = None,
        key: str | None = None,
    ) -> list[Generated]:
        """`sampling["n"]` samples of the prompt. `sampling` is SGLang's sampling_params.

        `VersionNotReadyError`, `UnavailableError` once the patience is over; `UsageError` where no repeat would help. `key`: that
        of an earlier call with the same arguments, whose answer is wanted.
        """
        body = generate_body(
            prompt, sampling=sampling, min_version=min_version, exact_version=exact_version, session=session, stream=False
        )
        return read_answer(await self.post("/generate", body, wait_seconds=wait_seconds, key=key))

    async def stream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        min_version: int | None = None,
        exact_version: int | None = None,
        wait_seconds: float = 0.0,
        session: str | None = None,
        key: str | None = None,
    ) -> AsyncIterator[Piece]:
        """One sample as it comes, each token once, also over gateways and replicas that die. Errors as `generate`'s."""
        body = generate_body(
            prompt, sampling=sampling, min_version=min_version, exact_version=exact_version, session=session, stream=True
        )
        sent, patience, following = headers(self._token, key or new_key(), wait_seconds), self._patience(), Following()
        while not following.done:
            retry_after: str | None = None
            fault: TowlineError
            try:
                async with self._http.stream("POST", "/generate", content=body, headers=sent) as response:
                    if response.status_code == 200:
                        async for line in response.aiter_lines():
                            if (piece := following.read(line)) is not None:
                                patience = self._patience()
                                yield piece
                        fault = UnavailableError("the gateway's stream ended early", code="gateway_stream")
                    else:
                        told = _json(await response.aread())
                        fault, retry_after = refusal(response.status_code, told), response.headers.get("retry-after")
                        if not passes(response.status_code, told):
                            raise fault
            except httpx.TransportError as error:
                fault = _lost(error)
            except UnavailableError as error:
                fault = error
            if not following.done:
                if (delay := patience.pause(retry_after)) is None:
                    raise fault
                await asyncio.sleep(delay)
                following.again()

    async def post(self, path: str, body: bytes, *, wait_seconds: float = 0.0, key: str | None = None) -> Any:
        """Any route of the gateway, by its JSON body; repeated as the others are."""
        sent, patience = headers(self._token, key or new_key(), wait_seconds), self._patience()
        while True:
            retry_after = None
            try:
                response = await self._http.post(path, content=body, headers=sent)
            except httpx.TransportError as error:
                fault: TowlineError = _lost(error)
            else:
                if (told := _judged(response)) is not None:
                    return told[0]
                fault, retry_after = refusal(response.status_code, _json(response.content)), response.headers.get("retry-after")
            if (delay := patience.pause(retry_after)) is None:
                raise fault
            await asyncio.sleep(delay)

    async def server_info(self) -> dict[str, Any]:
        """Versions and replicas, as they are now; `UnavailableError` at once where it can't be had."""
        try:
            return _info(await self._http.get("/server_info", headers=headers(self._token, "-", 0)))
        except httpx.TransportError as error:
            raise _lost(error) from error

    def _patience(self) -> Patience:
        return Patience(self._patience_seconds, time.monotonic)


class Gateway:
    """The same for callers without an event loop. Thread-safe."""

    def __init__(
        self, url: str, *, token: str = "", patience_seconds: float = PATIENCE_SECONDS, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self._token, self._patience_seconds = token, patience_seconds
        self._http = httpx.Client(base_url=url, timeout=_timeouts(silence_seconds), limits=_LIMITS)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        min_version: int | None = None,
        exact_version: int | None = None,
        wait_seconds: float = 0.0,
        session: str | None = None,
        key: str | None = None,
    ) -> list[Generated]:
        """See `AsyncGateway.generate`."""
        body = generate_body(
            prompt, sampling=sampling, min_version=min_version, exact_version=exact_version, session=session, stream=False
        )
        return read_answer(self.post("/generate", body, wait_seconds=wait_seconds, key=key))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Mapping[str, Any] | None = None,
        min_version: int | None = None,
        exact_version: int | None = None,
        wait_seconds: float = 0.0,
        session: str | None = None,
        key: str | None = None,
    ) -> Iterator[Piece]:
        """See `AsyncGateway.stream`."""
        body = generate_body(
            prompt, sampling=sampling, min_version=min_version, exact_version=exact_version, session=session, stream=True
        )
        sent, patience, following = headers(self._token, key or new_key(), wait_seconds), self._patience(), Following()
        while not following.done:
            retry_after: str | None = None
            fault: TowlineError
            try:
                with self._http.stream("POST", "/generate", content=body, headers=sent) as response:
                    if response.status_code == 200:
                        for line in response.iter_lines():
                            if (piece := following.read(line)) is not None:
                                patience = self._patience()
                                yield piece
                        fault = UnavailableError("the gateway's stream ended early", code="gateway_stream")
                    else:
                        told = _json(response.read())
                        fault, retry_after = refusal(response.status_code, told), response.headers.get("retry-after")
                        if not passes(response.status_code, told):
                            raise fault
            except httpx.TransportError as error:
                fault = _lost(error)
            except UnavailableError as error:
                fault = error
            if not following.done:
                if (delay := patience.pause(retry_after)) is None:
                    raise fault
                time.sleep(delay)
                following.again()

    def post(self, path: str, body: bytes, *, wait_seconds: float = 0.0, key: str | None = None) -> Any:
        """See `AsyncGateway.post`."""
        sent, patience = headers(self._token, key or new_key(), wait_seconds), self._patience()
        while True:
            retry_after = None
            try:
                response = self._http.post(path, content=body, headers=sent)
            except httpx.TransportError as error:
                fault: TowlineError = _lost(error)
            else:
                if (told := _judged(response)) is not None:
                    return told[0]
                fault, retry_after = refusal(response.status_code, _json(response.content)), response.headers.get("retry-after")
            if (delay := patience.pause(retry_after)) is None:
                raise fault
            time.sleep(delay)

    def server_info(self) -> dict[str, Any]:
        """See `AsyncGateway.server_info`."""
        try:
            return _info(self._http.get("/server_info", headers=headers(self._token, "-", 0)))
        except httpx.TransportError as error:
            raise _lost(error) from error

    def _patience(self) -> Patience:
        return Patience(self._patience_seconds, time.monotonic)


_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


def _timeouts(silence_seconds: float) -> httpx.Timeout:
    return httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS)


def _judged(response: httpx.Response) -> tuple[Any] | None:
    """The answer, in a tuple; None where a repeat may help. Raises what no repeat would change."""
    told = _json(response.content)
    if response.is_success:
        return (told,)
    if not passes(response.status_code, told):
        raise refusal(response.status_code, told)
    return None


def _info(response: httpx.Response) -> dict[str, Any]:
    told = _json(response.content)
    if not response.is_success or not isinstance(told, dict):
        raise refusal(response.status_code, told)
    return told


def _json(data: bytes) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return None


def _lost(error: httpx.TransportError) -> UnavailableError:
    reason = str(error) or type(error).__name__
    return UnavailableError(f"the connection to the gateway was lost: {reason}", code="gateway_unreachable")
