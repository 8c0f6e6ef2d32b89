"""The gateway's HTTP calls as steps (see steps.py): what each sends, and what it makes of the answer.

A call that the gateway can be asked twice is repeated for `patience_seconds`: /generate, chats and claims under an idempotency
key of their own, finishes because the gateway knows a repeat. Taking a turn back isn't: there a lost answer is an error.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from towline.client.rules import (
    Following,
    Generated,
    Patience,
    Piece,
    Said,
    VersionNotReadyError,
    Versions,
    bound,
    generate_body,
    headers,
    new_key,
    passes,
    read_answer,
    read_said,
    read_versions,
    refusal,
)
from towline.client.steps import Flow, Passed, Refused, Steps, Wait, followed, repeated
from towline.errors import UnavailableError, UsageError

POLL_SECONDS = 0.5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ask:
    """An HTTP request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """Whole; of a stream only where its status isn't 200."""

    status: int
    retry_after: str | None
    data: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer, or no more of one. `sent` is False where the gateway can't have seen the request."""

    error: UnavailableError
    sent: bool = True


Told: TypeAlias = Reply | Lost | str | None
"""A str is a line of a stream; None: it has ended."""
Call: TypeAlias = Steps[Ask, Told, T]


@dataclass(frozen=True, slots=True)
class Operations:
    """What both clients can do. `model`: the run's name; "" asks the gateway where a call needs it."""

    token: str
    patience_seconds: float
    model: str = ""
    clock: Callable[[], float] = time.monotonic

    # Rollouts

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
    ) -> Call[list[Generated]]:
        """`sampling["n"]` samples of the prompt. `sampling` is SGLang's sampling_params.

        `VersionNotReadyError`, `UnavailableError` once the patience is over; `UsageError` where no repeat would help. `key`: that
        of an earlier call with the same arguments, whose answer is wanted. `wait_seconds`: how long the gateway waits for such a
        version before it refuses. `session`: calls with the same go to the same replica while it has room.
        """
        body = generate_body(
            prompt, sampling=sampling, min_version=min_version, exact_version=exact_version, session=session, stream=False
        )
        return read_answer((yield from self.post("/generate", body, wait_seconds=wait_seconds, key=key)))

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
    ) -> Flow[Ask, Piece, Told]:
        """One sample as it comes, each token once, also over gateways and replicas that die. Errors as `generate`'s."""
        body = generate_body(
            prompt, sampling=sampling, min_version=min_version, exact_version=exact_version, session=session, stream=True
        )
        ask = Ask("POST", "/generate", headers(self.token, key or new_key(), wait_seconds), body)
        return followed(ask, _Lines(Following()), self._patience)

    def chat(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        min_version: int | None = None,
        exact_version: int | None = None,
        wait_seconds: float = 0.0,
        key: str | None = None,
        **fields: Any,
    ) -> Call[Said]:
        """One answer to a conversation. `fields`: OpenAI's others (max_tokens, temperature, tools, …). Errors as `generate`'s."""
        return (
            yield from self._said("/v1/chat/completions", messages, fields | bound(min_version, exact_version), wait_seconds, key)
        )

    # Sessions

    def open_session(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        ttl_seconds: float | None = None,
    ) -> Call[str]:
        """A new session's id. One whose answer was lost is asked for anew; the lost one expires."""
        fields = _given(tools=tools, chat_template_kwargs=chat_template_kwargs, ttl_seconds=ttl_seconds)
        return str((yield from self.post("/sessions", _json(fields)))["id"])

    def claim(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        environment: str | None = None,
        ttl_seconds: float | None = None,
        min_version: int | None = None,
        exact_version: int | None = None,
        wait_seconds: float = 0.0,
        key: str | None = None,
    ) -> Call[dict[str, Any] | None]:
        """A new session that is bound to an admitted sample, and its task: `id`, `task`, …; None where there is none to be had
        within `wait_seconds`. `ConflictError` where the next task isn't for the `environment`."""
        fields = _given(
            tools=tools, chat_template_kwargs=chat_template_kwargs, environment=environment, ttl_seconds=ttl_seconds
        ) | bound(min_version, exact_version)
        found: dict[str, Any] | None = yield from self.post("/tasks/claim", _json(fields), wait_seconds=wait_seconds, key=key)
        return found

    def turn(
        self,
        /,
        session: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        min_version: int | None = None,
        exact_version: int | None = None,
        wait_seconds: float = 0.0,
        key: str | None = None,
        **fields: Any,
    ) -> Call[Said]:
        """The session's next turn; `messages` is the conversation whole. `ConflictError` where another request changed the
        session meanwhile, or it is over: nothing of this one is kept. Other errors as `generate`'s."""
        path = f"/sessions/{session}/v1/chat/completions"
        return (yield from self._said(path, messages, fields | bound(min_version, exact_version), wait_seconds, key))

    def rollback(self, session: str) -> Call[dict[str, Any]]:
        """Take the last turn back. It isn't repeated once it may have been done: see `view_session` after `UnavailableError`."""
        ask = Ask("POST", f"/sessions/{session}/rollback", headers(self.token, new_key(), 0), b"{}")
        found: dict[str, Any] = yield from repeated(ask, _judge_once, self._patience())
        return found

    def finish(
        self,
        session: str,
        *,
        reference: Mapping[str, Any] | None = None,
        group: str | None = None,
        sample: int | None = None,
        group_size: int | None = None,
        node: int | None = None,
        reward: float | None = None,
        components: Mapping[str, float] | None = None,
    ) -> Call[dict[str, Any]]:
        """Publish a branch of the session (the head's, or that of `node`) as its sample's trajectory: `group`, `sample`,
        `subject`, `tokens`, `policy_tokens`, …. A claimed session is its task's sample. A repeat gets the same answer."""
        fields = _given(
            reference=reference, group=group, sample=sample, group_size=group_size, node=node, reward=reward,
            components=components,
        )  # fmt: skip
        found: dict[str, Any] = yield from self.post(f"/sessions/{session}/finish", _json(fields))
        return found

    def view_session(self, session: str) -> Call[dict[str, Any]]:
        """Its turns, tokens, logprobs, spans and mismatches."""
        found: dict[str, Any] = yield from self._get(f"/sessions/{session}")
        return found

    def delete_session(self, session: str) -> Call[None]:
        """It is no more; also where it wasn't any more."""
        ask = Ask("DELETE", f"/sessions/{session}", headers(self.token, new_key(), 0))

        def judge(told: Told) -> Passed[None] | Refused:
            verdict = _judge(told)
            gone = isinstance(told, Reply) and told.status == 404
            return Passed(None) if gone or isinstance(verdict, Passed) else verdict

        yield from repeated(ask, judge, self._patience())

    # Versions

    def versions(self) -> Call[Versions]:
        """What there is and what is served, now."""
        return read_versions((yield from self._get("/server_info")))

    def wait_for_version(
        self, *, min_version: int | None = None, exact_version: int | None = None, seconds: float | None = None
    ) -> Call[Versions]:
        """Until a replica serves such a version, for `seconds` (the patience where left out), then `VersionNotReadyError`."""
        target = exact_version if exact_version is not None else min_version
        if target is None or (exact_version is not None and min_version is not None):
            raise UsageError("give min_version or exact_version", code="version_constraint")
        until = self.clock() + (self.patience_seconds if seconds is None else seconds)
        while True:
            info = yield from self._get(f"/server_info?version={target}")
            found = read_versions(info)
            if target in found.serving if exact_version is not None else info["met"]:
                return found
            if self.clock() >= until:
                raise VersionNotReadyError(f"version {target} isn't served", target, found.applied)
            yield Wait(POLL_SECONDS)

    def server_info(self) -> Call[dict[str, Any]]:
        """Versions and replicas, as the gateway tells them."""
        found: dict[str, Any] = yield from self._get("/server_info")
        return found

    # What they are made of

    def post(self, path: str, body: bytes, *, wait_seconds: float = 0.0, key: str | None = None) -> Call[Any]:
        """Any route of the gateway, by its JSON body; repeated as the others are."""
        ask = Ask("POST", path, headers(self.token, key or new_key(), wait_seconds), body)
        return (yield from repeated(ask, _judge, self._patience()))

    def _get(self, path: str) -> Call[Any]:
        return (yield from repeated(Ask("GET", path, headers(self.token, "", 0)), _judge, self._patience()))

    def _said(
        self, path: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], wait_seconds: float, key: str | None
    ) -> Call[Said]:
        if fields.get("stream"):
            raise UsageError("stream: use an OpenAI client for streamed chats, or `stream` for tokens", code="chat_stream")
        model = fields.get("model") or self.model or (yield from self._get("/server_info"))["run"]
        body = _json({**fields, "model": model, "messages": [dict(message) for message in messages]})
        return read_said((yield from self.post(path, body, wait_seconds=wait_seconds, key=key)))

    def _patience(self) -> Patience:
        return Patience(self.patience_seconds, self.clock)


class _Lines:
    """A stream's lines, and what else comes of it."""

    def __init__(self, following: Following) -> None:
        self._following = following

    @property
    def done(self) -> bool:
        return self._following.done

    def again(self) -> None:
        self._following.again()

    def read(self, told: Told) -> Sequence[Piece] | Refused:
        if isinstance(told, str):
            try:
                piece = self._following.read(told)
            except UnavailableError as error:
                return Refused(error, passes=True)
            return [] if piece is None else [piece]
        if told is None:
            return Refused(UnavailableError("the gateway's stream ended early", code="gateway_stream"), passes=True)
        verdict = _judge(told)
        if isinstance(verdict, Refused):
            return verdict
        raise UnavailableError("the gateway answered a stream with something else", code="gateway_stream")


def _judge(told: Told) -> Passed[Any] | Refused:
    if isinstance(told, Lost):
        return Refused(told.error, passes=True)
    assert isinstance(told, Reply)
    tree = None
    with contextlib.suppress(ValueError):
        tree = json.loads(told.data)
    if 200 <= told.status < 300:
        return Passed(tree)
    return Refused(refusal(told.status, tree), passes(told.status, tree), told.retry_after)


def _judge_once(told: Told) -> Passed[Any] | Refused:
    """Of what isn't the same when it's done twice."""
    verdict = _judge(told)
    if isinstance(verdict, Refused) and isinstance(told, Lost):
        return Refused(verdict.error, passes=not told.sent)
    return verdict


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _json(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(tree).encode()
