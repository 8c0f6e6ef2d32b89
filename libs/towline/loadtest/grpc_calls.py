"""The clients' calls by gRPC: RolloutService.StreamGenerate, told as the calls by HTTP are."""

from __future__ import annotations

import time
from typing import Self

import grpc
import grpc.aio

from towline.loadtest.client_figures import Call
from towline.pb import rollout_pb2 as pb
from towline.pb.rollout_pb2_grpc import RolloutServiceStub

_REFUSED = {grpc.StatusCode.UNAVAILABLE: "refused.503", grpc.StatusCode.RESOURCE_EXHAUSTED: "refused.429"}


class GrpcCaller:
    """A channel of its own."""

    def __init__(self, address: str, token: str, timeout_seconds: float) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub, self._timeout = RolloutServiceStub(self._channel), timeout_seconds
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def stream(self, tenant: str, prompt: list[int], most: int, seed: int) -> Call:
        request = pb.GenerateRequest(
            prompts=[pb.Prompt(tokens=pb.TokenIds(ids=prompt))], sampling=pb.SamplingParams(max_new_tokens=most, seed=seed)
        )
        call = Call(tenant, "stream", now := time.time(), now)
        last = 0.0
        try:
            async for event in self._stub.StreamGenerate(request, timeout=self._timeout, metadata=self._metadata):
                for sample in event.samples:
                    last = call.piece(len(sample.tokens), (span.version for span in sample.spans), last)
        except grpc.aio.AioRpcError as error:
            call.outcome = _REFUSED.get(error.code(), f"grpc.{error.code().name}")
        call.ended = time.time()
        return call
