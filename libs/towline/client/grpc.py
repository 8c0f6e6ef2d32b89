"""The gateway over gRPC, async and sync: `generate` and `stream` as gateway.py's, and the versions as they come.

It needs the extra `gateway`. What is repeated, and when, is steps.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, assert_never, cast

import grpc
import grpc.aio

from towline.client.gateway import PATIENCE_SECONDS, SILENCE_SECONDS
from towline.client.grpc_messages import Calls, Options, Told, refused, versions_of
from towline.client.rules import Generated, Piece, Versions
from towline.client.steps import Next, Send, Show, Wait
from towline.pb import policy_pb2, rollout_pb2
from towline.pb.policy_pb2_grpc import PolicyServiceStub
from towline.pb.rollout_pb2_grpc import RolloutServiceStub

KEEPALIVE_SECONDS, ANSWER_SECONDS = 60, 20
"""A connection that is silent for so long is asked for a sign of life, and is lost where none comes in the time after it."""
_OPTIONS = [
    ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000), ("grpc.keepalive_timeout_ms", ANSWER_SECONDS * 1000),
]  # fmt: skip


class AsyncGrpcGateway:
    """`async with AsyncGrpcGateway("host:port", token=…) as gateway`. `certificate`: a PEM file to trust, for TLS."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        certificate: str = "",
        patience_seconds: float = PATIENCE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._calls = Calls(token, patience_seconds)
        self._seconds = silence_seconds
        if certificate:
            self._channel = grpc.aio.secure_channel(address, _trusting(certificate), _OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(address, _OPTIONS)
        self._rollouts = RolloutServiceStub(self._channel)
        self._policy = PolicyServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> list[Generated]:
        """`AsyncGateway.generate`, with the same options."""
        steps, told = self._calls.generate(prompt, **options), cast(Told, None)
        while True:
            try:
                step = steps.send(told)
            except StopIteration as end:
                return cast(list[Generated], end.value)
            told = None
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            else:
                try:
                    told = await self._rollouts.Generate(step.what.request, metadata=step.what.metadata, timeout=self._seconds)
                except grpc.RpcError as error:
                    told = error

    async def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncIterator[Piece]:
        """`AsyncGateway.stream`, with the same options."""
        flow, told, call = self._calls.stream(prompt, **options), cast(Told, None), cast(Any, None)
        events: AsyncIterator[rollout_pb2.GenerateEvent] | None = None
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
                    case Send(rpc):
                        call = self._rollouts.StreamGenerate(rpc.request, metadata=rpc.metadata)
                        events = aiter(call)
                        told = await _next_async(events)
                    case Next():
                        assert events is not None
                        told = await _next_async(events)
                    case _:
                        assert_never(step)
        finally:
            if call is not None:
                call.cancel()

    async def versions(self) -> Versions:
        """What there is and what is served, now; `UnavailableError` at once where it can't be had."""
        try:
            request = policy_pb2.GetStatusRequest()
            return versions_of(await self._policy.GetStatus(request, metadata=self._calls.metadata(""), timeout=self._seconds))
        except grpc.RpcError as error:
            raise refused(error).error from error

    async def watch_versions(self) -> AsyncIterator[Versions]:
        """What is served now, and again whenever that changes; `UnavailableError` where the gateway goes away."""
        call = self._policy.WatchVersions(policy_pb2.WatchVersionsRequest(), metadata=self._calls.metadata(""))
        try:
            async for status in call:
                yield versions_of(status)
        except grpc.RpcError as error:
            raise refused(error).error from error
        finally:
            call.cancel()


class GrpcGateway:
    """The same for callers without an event loop. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        certificate: str = "",
        patience_seconds: float = PATIENCE_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._calls = Calls(token, patience_seconds)
        self._seconds = silence_seconds
        if certificate:
            self._channel = grpc.secure_channel(address, _trusting(certificate), _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._rollouts, self._policy = RolloutServiceStub(self._channel), PolicyServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> list[Generated]:
        """`Gateway.generate`, with the same options."""
        steps, told = self._calls.generate(prompt, **options), cast(Told, None)
        while True:
            try:
                step = steps.send(told)
            except StopIteration as end:
                return cast(list[Generated], end.value)
            told = None
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            else:
                try:
                    told = self._rollouts.Generate(step.what.request, metadata=step.what.metadata, timeout=self._seconds)
                except grpc.RpcError as error:
                    told = error

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Iterator[Piece]:
        """`Gateway.stream`, with the same options."""
        flow, told, call = self._calls.stream(prompt, **options), cast(Told, None), cast(Any, None)
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
                    case Send(rpc):
                        call = self._rollouts.StreamGenerate(rpc.request, metadata=rpc.metadata)
                        told = _next(call)
                    case Next():
                        told = _next(call)
                    case _:
                        assert_never(step)
        finally:
            if call is not None:
                call.cancel()

    def versions(self) -> Versions:
        """See `AsyncGrpcGateway.versions`."""
        try:
            request = policy_pb2.GetStatusRequest()
            return versions_of(self._policy.GetStatus(request, metadata=self._calls.metadata(""), timeout=self._seconds))
        except grpc.RpcError as error:
            raise refused(error).error from error


def _trusting(certificate: str) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(Path(certificate).read_bytes())


def _next(call: Iterator[rollout_pb2.GenerateEvent]) -> Told:
    try:
        return next(call, None)
    except grpc.RpcError as error:
        return error


async def _next_async(events: AsyncIterator[rollout_pb2.GenerateEvent]) -> Told:
    try:
        return await anext(events, None)
    except grpc.RpcError as error:
        return error
