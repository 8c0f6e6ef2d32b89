"""SGLang's HTTP API, as far as an engine needs it: each call has a time-out, and what goes wrong is one of our errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx

from towline.errors import EngineError, UnavailableError

CALL_SECONDS = 20.0
UPDATE_SECONDS = 600.0
STREAM_SECONDS = 600.0
"""Longest silence of a stream: the wait for a place in the batch, or a pause."""
NOTHING = "gARdlC4="
"""What SGLang wants instead of tensors, for one rank: base64 of an empty list as Python pickles it. The weights are in a
file that the loader opens, so nothing is pickled here, and SGLang unpickles this constant alone."""


_STREAMS_A_POOL = 8
"""A pool's work for each request grows with its connections: one of 256 took ten times the processor time of these."""


@dataclass(slots=True, eq=False)
class _Pool:
    http: httpx.AsyncClient
    streams: int = 0


def _pool(url: str) -> httpx.AsyncClient:
    # Plain HTTP on loopback: no certificates to load for each.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_STREAMS_A_POOL)
    return httpx.AsyncClient(base_url=url, timeout=CALL_SECONDS, limits=limits, trust_env=False, verify=False)


class SglangClient:
    """One server at `url`, which takes `streams` requests at a time. Raises `UnavailableError` where it can't be reached,
    `EngineError` where it refuses."""

    def __init__(self, url: str, *, streams: int) -> None:
        self.url = url
        self._control = _pool(url)
        self._pools = [_Pool(_pool(url)) for _ in range(-(-streams // _STREAMS_A_POOL))]

    async def close(self) -> None:
        await self._control.aclose()
        for pool in self._pools:
            await pool.http.aclose()

    async def model_info(self, *, seconds: float = CALL_SECONDS) -> dict[str, Any]:
        """Answers while the server is paused too, where /health would hang."""
        return await self._call("GET", "/model_info", seconds=seconds)

    async def generate_once(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._call("POST", "/generate", body, seconds=STREAM_SECONDS)

    async def generate(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """What came after the answer before, again and again; the last one has a finish_reason."""
        timeout = httpx.Timeout(CALL_SECONDS, read=STREAM_SECONDS)
        pool = min(self._pools, key=lambda pool: pool.streams)
        pool.streams += 1
        try:
            async with pool.http.stream("POST", "/generate", json=body | {"stream": True}, timeout=timeout) as response:
                if response.status_code != 200:
                    raise _refusal("/generate", response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        answer = json.loads(line[6:])
                        if "error" in answer:
                            raise EngineError(f"SGLang refused a request: {_message(answer)}", code="engine_request")
                        yield answer
        except httpx.HTTPError as error:
            raise _unreachable("/generate", error) from error
        except json.JSONDecodeError as error:
            raise EngineError(f"SGLang's stream can't be read: {error}", code="engine_answer") from error
        finally:
            pool.streams -= 1

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/abort_request", {"rid": rid})

    async def pause(self, mode: str) -> None:
        await self._call("POST", "/pause_generation", {"mode": mode}, seconds=UPDATE_SECONDS)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {"torch_empty_cache": False})

    async def run_loader(self, loader: str, *, ranks: int, label: str | None, flush: bool) -> None:
        """Make every rank run the custom weight loader; `EngineError` with its reason where one failed."""
        await self._update(NOTHING, ranks, "target", label, flush, load_format=loader)

    async def load_tensors(self, payload: str, *, ranks: int, label: str, flush: bool) -> None:
        """Load whole tensors, of which every rank takes its shard; `payload` is base64 of the pickled [(name, tensor)]."""
        await self._update(payload, ranks, "all", label, flush)

    async def _update(self, payload: str, ranks: int, selector: str, label: str | None, flush: bool, **more: str) -> None:
        await self._call("POST", "/begin_weight_update", {"selector": selector}, seconds=UPDATE_SECONDS)
        # One entry a rank: a shorter list would end the server.
        body: dict[str, Any] = {"serialized_named_tensors": [payload] * ranks, "flush_cache": flush, "selector": selector}
        try:
            await self._call("POST", "/update_weights_from_tensor", body | ({"weight_version": label} if label else {}) | more,
                             seconds=UPDATE_SECONDS)  # fmt: skip
        finally:
            await self._call("POST", "/end_weight_update", {}, seconds=UPDATE_SECONDS)

    async def load_folder(self, folder: str, *, label: str, flush: bool) -> None:
        """Load the folder's tensors over the live ones; those that it lacks stay."""
        body = {"model_path": folder, "weight_version": label, "flush_cache": flush}
        await self._call("POST", "/update_weights_from_disk", body, seconds=UPDATE_SECONDS)

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float = CALL_SECONDS
    ) -> dict[str, Any]:
        try:
            response = await self._control.request(method, path, json=body, timeout=httpx.Timeout(CALL_SECONDS, read=seconds))
        except httpx.HTTPError as error:
            raise _unreachable(path, error) from error
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = {}
        if response.status_code != 200 or (isinstance(answer, dict) and answer.get("success") is False):
            raise _refusal(path, response.status_code, response.content)
        return answer if isinstance(answer, dict) else {"answer": answer}


def _unreachable(path: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"SGLang can't be reached at {path}: {type(error).__name__} {error}".rstrip(), code="engine_unreachable"
    )


def _refusal(path: str, status: int, content: bytes) -> EngineError:
    try:
        text = _message(json.loads(content))
    except ValueError:
        text = content.decode(errors="replace")
    return EngineError(f"SGLang answered {path} with {status}: {' '.join(text.split())[:500]}", code="engine_request")


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        inner = answer.get("error", answer)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(answer)
