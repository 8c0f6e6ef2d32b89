"""A policy that may use a tool: it writes a call between two tokens of their own, the tool's answer follows, it goes on.

Where policy text ends and tool text begins is told by token IDs alone. The call's closing token must be among
`sampling.stop_token_ids`, so that the engine stops at it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from towline.contract.task import Task
from towline.environment.base import Step
from towline.environment.text import decode, encode, token_id
from towline.errors import UsageError

MAX_ANSWER_CHARACTERS = 2000
Tool = Callable[[str], str | Awaitable[str]]


class ToolRefused(Exception):
    """A tool's word that it can't do what was asked; the policy reads why. Anything else that it raises fails the attempt."""


class ToolUse:
    """Ends with the policy's first turn that isn't a call, or (`limit_reached`) with a call beyond `max_calls`.

    `call` and `answer` are the pairs of tokens around a call and around its answer, each one token of the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool: Tool,
        *,
        call: tuple[str, str] = ("<tool>", "</tool>"),
        answer: tuple[str, str] = ("<result>", "</result>"),
        max_calls: int = 4,
    ) -> None:
        self._tokenizer, self._tool, self._max_calls = tokenizer, tool, max_calls
        self._opens, self._closes = (token_id(tokenizer, token) for token in call)
        self._answer_opens, self._answer_closes = (token_id(tokenizer, token) for token in answer)
        self._calls = 0
        self._stops: tuple[int, ...] = ()

    def reset(self, task: Task) -> list[int]:
        if self._closes not in task.sampling.stop_token_ids:
            raise UsageError(
                f"sampling.stop_token_ids {list(task.sampling.stop_token_ids)} lack {self._closes}, which closes a call; "
                "add it, and the end-of-sequence tokens with it",
                code="stop_tokens",
            )
        self._stops = task.sampling.stop_token_ids
        tokens: list[int] = task.prompt_tokens.tolist()
        return tokens

    async def step(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step:
        if finish != "stop" or tokens[-1] != self._closes:
            return Step(done=True)
        if self._calls >= self._max_calls:
            return Step(done=True, limit_reached=True)
        self._calls += 1
        text = await self._answer(tokens[:-1])
        # A tool that is made to say such a token mustn't end its own answer, or begin a call in the policy's name.
        own = (self._opens, self._closes, self._answer_opens, self._answer_closes, *self._stops)
        words = [token for token in encode(self._tokenizer, text[:MAX_ANSWER_CHARACTERS]) if token not in own]
        return Step(tokens=[self._answer_opens, *words, self._answer_closes], kind="tool", done=False)

    def save(self) -> bytes:
        return msgspec.msgpack.encode(self._calls)

    def restore(self, task: Task, saved: bytes) -> None:
        self._calls, self._stops = msgspec.msgpack.decode(saved, type=int), task.sampling.stop_token_ids

    async def _answer(self, tokens: list[int]) -> str:
        """To the call that the turn ends with."""
        if self._opens not in tokens:
            return "a call without a beginning"
        begins = len(tokens) - tokens[::-1].index(self._opens)
        try:
            answer = self._tool(decode(self._tokenizer, tokens[begins:]))
            return await answer if inspect.isawaitable(answer) else answer
        except ToolRefused as why:
            return str(why)
