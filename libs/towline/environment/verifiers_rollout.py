"""Environments of the `verifiers` package (its 0.1 line), turn by turn: as prompts, as an environment, and for their rewards.

The package runs its own rollout; we are the model that it asks. Its messages become tokens by the templates given here (ChatML
unless others are); the policy's tokens are decoded for it to read, and stay what they are. Environments whose model must answer
with tool calls of an API's kind aren't supported, nor such that rewrite what was said before.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from towline.contract.task import PromptRef, Task
from towline.environment.base import Step
from towline.environment.prompts import Prompt
from towline.environment.text import decode, encode
from towline.errors import UsageError

TURN, OPENING, AFTER = "<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n", "\n"
"""A turn; what stands before the policy's own; what the template has after the policy's stop token."""


def load_package() -> Any:
    """The package; `UsageError` where it, or one of the 0.1 line, isn't installed."""
    try:
        package = importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        raise UsageError(f"no module {error.name!r}: pip install 'verifiers<0.2'", code="verifiers_missing") from error
    if not hasattr(package, "load_environment"):
        raise UsageError("this verifiers has no load_environment: pip install 'verifiers<0.2'", code="verifiers_missing")
    return package


def load(name: str, arguments: Mapping[str, Any]) -> Any:
    """The environment NAME, loaded once a process for the same arguments."""
    return _load(name, msgspec.json.encode(dict(arguments), order="sorted"))


@lru_cache(maxsize=16)
def _load(name: str, arguments: bytes) -> Any:
    return load_package().load_environment(name, **msgspec.json.decode(arguments))


def row(environment: Any, split: str, index: int) -> dict[str, Any]:
    """A row of its dataset, as a rollout takes it."""
    return dict(_dataset(environment, split)[index])


def _dataset(environment: Any, split: str) -> Any:
    return environment.get_eval_dataset() if split == "eval" else environment.get_dataset()


class Prompts:
    """The rows of an environment's dataset in order; `prompts.source` is `train_prompts` or `eval_prompts` below."""

    def __init__(self, tokenizer: Any, name: str, arguments: Mapping[str, Any], split: str, turn: str, opening: str) -> None:
        self._tokenizer, self._environment, self._name, self._split = tokenizer, load(name, arguments), name, split
        self._turn, self._opening = turn, opening

    def __len__(self) -> int:
        return len(_dataset(self._environment, self._split))

    def get(self, epoch: int, position: int) -> Prompt:
        messages = row(self._environment, self._split, position)["prompt"]
        text = messages if isinstance(messages, str) else render(messages, self._turn) + self._opening
        return Prompt(
            tokens=encode(self._tokenizer, text), ref=PromptRef(f"{self._name}-{self._split}", epoch, position),
            reference={"split": self._split, "row": position},
        )  # fmt: skip


def train_prompts(
    tokenizer: Any, seed: int, *, environment: str, arguments: Mapping[str, Any] | None = None, turn: str = TURN,
    opening: str = OPENING,
) -> Prompts:  # fmt: skip
    """`environment` is the package's name for it, `arguments` are its own."""
    return Prompts(tokenizer, environment, arguments or {}, "train", turn, opening)


def eval_prompts(
    tokenizer: Any, seed: int, *, environment: str, arguments: Mapping[str, Any] | None = None, turn: str = TURN,
    opening: str = OPENING,
) -> Prompts:  # fmt: skip
    """The evaluation split likewise."""
    return Prompts(tokenizer, environment, arguments or {}, "eval", turn, opening)


class VerifiersEnvironment:
    """`prompts.environment`; its `environment_arguments` are those of the prompts, and `after`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        environment: str,
        arguments: Mapping[str, Any] | None = None,
        turn: str = TURN,
        opening: str = OPENING,
        after: str = AFTER,
    ) -> None:
        self._tokenizer, self._environment = tokenizer, load(environment, arguments or {})
        self._turn, self._opening, self._after = turn, opening, after
        self._conversation: Conversation | None = None

    async def reset(self, task: Task) -> list[int]:
        split, index = task.reference["split"], task.reference["row"]
        self._conversation = Conversation(self._environment, row(self._environment, split, index))
        await self._conversation.begin()
        tokens: list[int] = task.prompt_tokens.tolist()
        return tokens

    async def step(self, tokens: list[int], finish: Literal["stop", "length"]) -> Step:
        assert self._conversation is not None
        said = await self._conversation.say(decode(self._tokenizer, tokens), truncated=finish == "length")
        if said is None:
            condition = self._conversation.state.get("stop_condition")
            return Step(done=True, limit_reached=condition == "max_turns_reached", info={"stop_condition": condition})
        text = self._after + render(said, self._turn) + self._opening
        return Step(tokens=encode(self._tokenizer, text), done=False)

    async def close(self) -> None:
        if self._conversation is not None:
            await self._conversation.close()


class Conversation:
    """One rollout of the package's, held at each point where it asks its model. `state` is the package's, once it's over."""

    def __init__(self, environment: Any, example: Mapping[str, Any]) -> None:
        self._environment, self._example = environment, dict(example)
        self._asked: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._answer: asyncio.Future[tuple[str, bool]] | None = None
        self._prompt: list[Any] = []
        self._rollout: asyncio.Task[Any] | None = None
        self.state: Any = None

    async def begin(self) -> None:
        """To its first question."""
        self._rollout = asyncio.create_task(self._environment.rollout(self._example, _model(self), "towline", {}))
        if await self._next() is None:
            raise ValueError(f"the environment ended before its first question: {self.state.get('error')!r}")

    async def say(self, text: str, *, truncated: bool = False) -> list[Any] | None:
        """The model's turn; what was said to it then, or None where that was the end."""
        assert self._answer is not None
        before = self._prompt
        self._answer.set_result((text, truncated))
        following = await self._next()
        if following is None:
            return None
        if following[: len(before)] != before or len(following) <= len(before):
            raise ValueError("the environment rewrote what was said before; only such that add to it are supported")
        return following[len(before) + 1 :]

    async def close(self) -> None:
        """Give it up."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _next(self) -> list[Any] | None:
        assert self._rollout is not None
        asked = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait([asked, self._rollout], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if asked.done() and not asked.cancelled():
            self._prompt = asked.result()
            return self._prompt
        self.state = self._rollout.result()
        if (error := self.state.get("error")) is not None:
            raise error
        return None

    async def ask(self, prompt: Sequence[Any]) -> tuple[str, bool]:
        """The package's question."""
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(list(prompt))
        return await self._answer


def render(messages: Sequence[Any], turn: str) -> str:
    """Messages as text, by one template for each."""
    text = ""
    for message in messages:
        role, content = (message["role"], message["content"]) if isinstance(message, Mapping) else (message.role, message.content)
        if not isinstance(content, str):
            raise ValueError(f"a {role} message without plain text; only text is supported")
        # Not str.format: what is said may hold braces.
        text += turn.replace("{role}", str(role)).replace("{content}", content)
    return text


def _model(conversation: Conversation) -> Any:
    """A client of the package's kind that asks the conversation."""
    package, types = load_package(), importlib.import_module("verifiers.types")

    async def get_response(self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        if tools:
            raise ValueError("environments that call tools by an API's tool calls aren't supported")
        text, truncated = await conversation.ask(prompt)
        message = types.ResponseMessage(content=text, finish_reason="length" if truncated else "stop", is_truncated=truncated)
        return types.Response(id="towline", created=int(time.time()), model=model, message=message)

    client = type("TowlineModel", (package.Client,), {"get_response": get_response, "__abstractmethods__": frozenset()})
    client.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return client(None)
