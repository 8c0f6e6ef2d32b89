"""The API's OpenAPI document, made of the models that check the bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from towline.gateway.bodies import ChatBody, ClaimBody, CompletionBody, FinishBody, GenerateBody, SessionBody, SessionChatBody
from towline.gateway.sessions import CHAT

_REF = "#/components/schemas/{model}"
_FAULTS = {
    "400": "the request can't be served as it is", "401": "a token is needed", "403": "not a route for clients",
    "404": "no such model, session or path", "405": "another method is needed",
    "409": "WeightVersionNotReady: no replica serves such a version; IdempotencyKeyInUse; SessionConflict",
    "413": "the body is too large", "422": "the Idempotency-Key was used with another body", "429": "the tenant's limits",
    "503": "no replica, or none with room: Retry-After",
}  # fmt: skip

_MADE = {"201": {"description": "it is made"}, "204": {"description": "there is none to be had"}}


def document(title: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    posted: dict[str, tuple[type[BaseModel], str]] = {
        "/generate": (GenerateBody, "SGLang's request and answer, with weight_version"),
        "/v1/completions": (CompletionBody, "OpenAI's completions"),
        "/v1/chat/completions": (ChatBody, "OpenAI's chat completions"),
        CHAT: (SessionChatBody, "the session's next turn, as OpenAI's chat completions"),
    }
    sessions: dict[tuple[str, str], tuple[type[BaseModel] | None, str]] = {
        ("/tasks/claim", "post"): (ClaimBody, "a new session that is bound to an admitted sample; 204: there is none to be had"),
        ("/sessions", "post"): (SessionBody, "a new session"),
        ("/sessions/{session}", "get"): (None, "its turns, tokens and logprobs"),
        ("/sessions/{session}", "delete"): (None, "it is no more"),
        ("/sessions/{session}/rollback", "post"): (None, "the last turn is taken back"),
        ("/sessions/{session}/finish", "post"): (FinishBody, "the head's branch is published as a trajectory"),
    }
    bodies = [model for model, _ in (*posted.values(), *sessions.values()) if model is not None]
    _, definitions = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
    paths: dict[str, Any] = {}
    for path, (model, summary) in posted.items():
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": _operation(path),
                "parameters": [
                    *_in_path(path),
                    _header("Prefer", {"type": "string", "pattern": "^wait=[0-9]{1,3}$"}),
                    _header("Idempotency-Key", {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,255}$"}),
                ],
                "requestBody": _body(model),
                "responses": _responses("the answer; with `stream`, server-sent events"),
            }
        }
    for (path, method), (body, summary) in sessions.items():
        paths.setdefault(path, {})[method] = {
            "summary": summary,
            "operationId": f"{method}_{_operation(path)}",
            "parameters": _in_path(path),
            "responses": _responses(summary) | ({} if _in_path(path) else _MADE),
        } | ({"requestBody": _body(body)} if body is not None else {})
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


def _body(model: type[BaseModel]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}}


def _operation(path: str) -> str:
    return path.strip("/").replace("/", "_").replace("{", "").replace("}", "")


def _in_path(path: str) -> list[dict[str, Any]]:
    named = {"name": "session", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^sess-[0-9a-f]{32}$"}}
    return [named] if "{session}" in path else []


def _header(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _responses(summary: str) -> dict[str, Any]:
    return {"200": {"description": summary}} | {status: {"description": text} for status, text in _FAULTS.items()}
