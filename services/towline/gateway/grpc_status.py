"""What the gateway says over gRPC where it doesn't serve: a google.rpc.Status whose details name the refusal as HTTP does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.any_pb2 import Any as Detail
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from towline import spans
from towline.gateway import answers
from towline.gateway.answers import ApiError
from towline.gateway.metering import Metering
from towline.gateway.tenants import Tenants
from towline.pb.rollout_pb2 import Refusal

Context = grpc.aio.ServicerContext[Any, Any]
MOST_CHARACTERS = 1000
"""Of a status' message: statuses travel in a header of 8 KB."""
RETRYABLE = frozenset({"WeightVersionNotReady", "EngineUnavailable", "rate_limit_error"})
_BY_KIND = {
    "WeightVersionNotReady": grpc.StatusCode.FAILED_PRECONDITION,
    "IdempotencyKeyReused": grpc.StatusCode.ALREADY_EXISTS,
}
_BY_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT, 401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND, 409: grpc.StatusCode.ABORTED, 413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED, 503: grpc.StatusCode.UNAVAILABLE,
}  # fmt: skip
_log = structlog.get_logger("towline.gateway")


def code_of(error: ApiError) -> grpc.StatusCode:
    return _BY_KIND.get(error.kind) or _BY_STATUS.get(error.status, grpc.StatusCode.INTERNAL)


def status_of(error: ApiError) -> Status:
    """With a Refusal, and a RetryInfo where HTTP has Retry-After."""
    refusal = Refusal(type=error.kind, retryable=error.kind in RETRYABLE)
    for name in ("target_version", "applied"):
        if error.fields.get(name) is not None:
            setattr(refusal, name, error.fields[name])
    details: list[Message] = [refusal]
    if (seconds := error.headers.get("Retry-After")) is not None:
        details.append(RetryInfo(retry_delay=Duration(seconds=int(seconds))))
    packed = []
    for detail in details:
        packed.append(Detail())
        packed[-1].Pack(detail)
    return Status(code=code_of(error).value[0], message=error.message[:MOST_CHARACTERS], details=packed)


async def abort(context: Context, error: ApiError) -> NoReturn:
    said = rpc_status.to_status(status_of(error))
    await context.abort(said.code, said.details, tuple(said.trailing_metadata or ()))
    raise AssertionError("abort returned")


def metadata(context: Context, name: str) -> str | None:
    """The first value of that name; None: there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("utf-8", "replace")
    return None


class Guard:
    """Around every call: whose it is, how many may run, and what its failure is called."""

    def __init__(self, tenants: Tenants, metering: Metering, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants, self.metering, self._clock = tenants, metering, clock

    @contextlib.asynccontextmanager
    async def call(self, route: str, context: Context) -> AsyncIterator[tuple[str, float]]:
        """The tenant and when the call began."""
        fault: ApiError
        began = self._clock()
        try:
            tenant = self._tenants.of(metadata(context, "authorization") or "")
            with spans.request("gateway.request", metadata(context, spans.TRACEPARENT)) as span:
                if span:
                    span.set(route=route, tenant=tenant)
                with self._tenants.admitted(tenant), self.metering.request(route, began):
                    yield tenant, began
            self.metering.answered(route, "OK")
            return
        except ApiError as error:
            fault = error
        except answers.FAULTS as error:
            fault = _known(route, error)
        self.metering.answered(route, code_of(fault).name)
        await abort(context, fault)


def _known(route: str, error: BaseException) -> ApiError:
    try:
        return answers.of(error)
    except answers.FAULTS:
        _log.error("answer_failed", route=route, exc_info=error)
        return ApiError(500, "internal_error", f"{type(error).__name__}: see the gateway's log")
