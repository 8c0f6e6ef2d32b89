"""The API's OpenAPI document, made of the models that check the bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from towline.gateway.bodies import ChatBody, CompletionBody, GenerateBody

_REF = "#/components/schemas/{model}"
_FAULTS = {
    "400": "the request can't be served as it is", "401": "a token is needed", "403": "not a route for clients",
    "404": "no such model or path", "405": "another method is needed",
    "409": "WeightVersionNotReady: no replica serves such a version; IdempotencyKeyInUse",
    "413": "the body is too large", "422": "the Idempotency-Key was used with another body", "429": "the tenant's limits",
    "503": "no replica, or none with room: Retry-After",
}  # fmt: skip


def document(title: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    posted: dict[str, tuple[type[BaseModel], str]] = {
        "/generate": (GenerateBody, "SGLang's request and answer, with weight_version"),
        "/v1/completions": (CompletionBody, "OpenAI's completions"),
        "/v1/chat/completions": (ChatBody, "OpenAI's chat completions"),
    }
    _, definitions = models_json_schema([(model, "validation") for model, _ in posted.values()], ref_template=_REF)
    paths: dict[str, Any] = {}
    for path, (model, summary) in posted.items():
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": path.strip("/").replace("/", "_"),
                "parameters": [
                    _header("Prefer", {"type": "string", "pattern": "^wait=[0-9]{1,3}$"}),
                    _header("Idempotency-Key", {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,255}$"}),
                ],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}},
                },
                "responses": _responses("the answer; with `stream`, server-sent events"),
            }
        }
    for path, summary in {
        "/v1/models": "the run and the versions that are served", "/server_info": "the fleet", "/health": "ready or not",
        "/ready": "the same", "/metrics": "Prometheus",
    }.items():  # fmt: skip
        paths[path] = {"get": {"summary": summary, "responses": _responses(summary)}}
    paths["/wake"] = {"post": {"summary": "ready or not", "responses": _responses("ready")}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Towline gateway: {title}", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _header(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _responses(summary: str) -> dict[str, Any]:
    return {"200": {"description": summary}} | {status: {"description": text} for status, text in _FAULTS.items()}
