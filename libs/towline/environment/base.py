"""What a sample is generated in: it gives the first tokens, answers what the policy says, and ends the sample.

One environment object serves one sample. Both methods may be plain functions or coroutines; a plain one that blocks holds
up every other sample of its worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast, runtime_checkable

from towline.config import import_object
from towline.contract.task import Task
from towline.errors import UsageError

SINGLE_TURN = "single-turn"
_KNOWN = {SINGLE_TURN: "towline.environment.single_turn:SingleTurn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The environment's answer. `tokens` follow the policy's, with loss_mask 0; where `done`, nothing more is generated."""

    tokens: list[int] = field(default_factory=list)
    kind: Literal["environment", "tool"] = "environment"
    done: bool
    limit_reached: bool = False
    """The environment ended the sample because its turns or tools were used up: the finish is `tool_limit`."""
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """An exception from either method is a failed attempt (stage `environment`), never a reward."""

    def reset(self, task: Task) -> list[int] | Awaitable[list[int]]:
        """The prompt's tokens, at least one."""
        ...

    def step(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step | Awaitable[Step]:
        """The answer to the policy's latest `tokens`, which ended by a stop token or by the sample's token limit."""
        ...


@runtime_checkable
class Closing(Protocol):
    """What an environment may have besides, that holds something outside of itself."""

    async def close(self) -> None:
        """Its sample is over, or was given up. Called once."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """What an environment may have besides, so that a sample can go on in another process. One that hasn't is brought to the
    same state by the policy's turns, which it must then answer with the very same tokens; else the sample begins anew."""

    def save(self) -> bytes | Awaitable[bytes]:
        """Its state after its last answer."""
        ...

    def restore(self, task: Task, saved: bytes) -> Awaitable[None] | None:
        """Instead of `reset`: be in the saved state. `saved` comes from the bus: raise for what isn't a state."""
        ...


def environment_factory(
    name: str, arguments: Mapping[str, Any] | None = None, tokenizer: Any = None
) -> Callable[[], Environment]:
    """What makes an environment: `single-turn`, or an import path `module:name` that is called once a sample, with `arguments`
    and, where it has a parameter of that name, with the model's `tokenizer`. `UsageError` where that can't be done."""
    make = import_object(_KNOWN.get(name, name), "prompts.environment")
    given = dict(arguments or {})
    try:
        signature = inspect.signature(make)
        if "tokenizer" in signature.parameters:
            given["tokenizer"] = tokenizer
        signature.bind(**given)
    except TypeError as error:
        raise UsageError(f"prompts.environment = {name!r}, prompts.environment_arguments: {error}", code="environment") from error
    return lambda: cast(Environment, make(**given))
