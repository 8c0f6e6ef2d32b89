"""What the gateway says where it doesn't serve: one JSON body a fault, with a type to match on and what to do."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from towline.errors import TowlineError, UnavailableError, UsageError
from towline.gateway.idempotency import OtherBody, TakenOver
from towline.gateway.samples import Invalid, NoReplica, NotReady

RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, kind: str, message: str, *, headers: dict[str, str] | None = None, **fields: Any) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, " ".join(message.split())
        self.headers, self.fields = headers or {}, fields

    @property
    def body(self) -> dict[str, Any]:
        if self.kind == "WeightVersionNotReady":
            return {"type": self.kind, "message": self.message, **self.fields}
        return {"error": {"type": self.kind, "message": self.message, "code": self.kind, "param": None, **self.fields}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def invalid(message: str) -> ApiError:
    return ApiError(400, "invalid_request_error", message)


def unavailable(message: str) -> ApiError:
    return ApiError(503, "EngineUnavailable", message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)}, retryable=True)


FAULTS = (NotReady, NoReplica, Invalid, OtherBody, TakenOver, TowlineError)
"""What `of` knows."""


def of(error: BaseException) -> ApiError:
    """The answer that says it. Whatever isn't known here is raised on."""
    match error:
        case NotReady():
            return ApiError(
                409, "WeightVersionNotReady", error.message, target_version=error.constraint.target, applied=error.applied,
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )  # fmt: skip
        case NoReplica():
            return unavailable(str(error))
        case Invalid():
            return invalid(str(error))
        case OtherBody():
            return ApiError(422, "IdempotencyKeyReused", "this Idempotency-Key was used with another request: use a new key")
        case TakenOver():
            return ApiError(409, "IdempotencyKeyInUse", "a later request with this Idempotency-Key goes on with it")
        case UsageError():
            return invalid(error.message)
        case UnavailableError():
            return unavailable(error.message)
    raise error
