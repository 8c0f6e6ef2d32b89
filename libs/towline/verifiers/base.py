"""What a reward function gets and gives, and how a run's own is found.

A verifier is any callable. With scope `sample` it takes one `Sample` and returns a float or a `Reward`; with scope `group`
it takes the group's samples in order and returns as many. It may be `async`. A class is made once, with the configured
arguments, and its object is called; a plain function gets them as keyword arguments at every call.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from towline.config import import_object
from towline.contract.task import PromptRef
from towline.contract.trajectory import FinishReason, Trajectory
from towline.errors import UsageError, VerifierError
from towline.verifiers.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One finished sample, as its verifier sees it. Token IDs are the truth; `text` is decoded when it is asked for.

    Compared by identity, so that a group verifier may sort, index and hash its samples.
    """

    prompt_tokens: npt.NDArray[np.int32]
    """int32[P], everything before the policy's first turn."""
    response_tokens: npt.NDArray[np.int32]
    """int32[R], everything after the prompt, the end-of-sequence token and tool or environment turns included."""
    policy_mask: npt.NDArray[np.uint8]
    """uint8[R], 1 where the policy chose the token."""
    finish: FinishReason
    """`stop`: the policy ended it; `length`, `tool_limit`, `deadline`: it was cut off."""
    reference: dict[str, Any]
    """What the prompt source gave for the verifier alone."""
    prompt_ref: PromptRef
    tokenizer: Tokenizer
    group: int
    sample: int

    @property
    def text(self) -> str:
        """The response without special tokens."""
        return self.tokenizer.decode(self.response_tokens.tolist(), skip_special_tokens=True)

    @property
    def prompt(self) -> str:
        """The prompt without special tokens."""
        return self.tokenizer.decode(self.prompt_tokens.tolist(), skip_special_tokens=True)

    @property
    def policy_tokens(self) -> int:
        return int(self.policy_mask.sum())


@dataclass(frozen=True, slots=True)
class Reward:
    """A sample's reward and, for people and dashboards, what it is made of."""

    value: float
    components: dict[str, float] = field(default_factory=dict)


SampleVerifier = Callable[[Sample], float | Reward]
GroupVerifier = Callable[[list[Sample]], Sequence[float | Reward]]


@dataclass(frozen=True, slots=True)
class Verifier:
    """A loaded reward function. `name` goes into every score, with `@VERSION` where the function or class has an attribute
    `version`; `call` may be a coroutine function."""

    name: str
    call: Callable[[Any], Any]
    is_async: bool


def load_verifier(path: str, arguments: dict[str, Any] | None = None, *, setting: str = "reward.function") -> Verifier:
    """The verifier that `module:name` names; `UsageError` says which setting is wrong and why."""
    target: Any = import_object(path, setting)
    arguments = arguments or {}
    if not callable(target):
        raise UsageError(f"{setting} = {path!r} isn't callable; name a function or a class with __call__", code="import")
    _check_arguments(target, arguments, path, setting)
    if inspect.isclass(target):
        call: Any = target(**arguments)
        if not callable(call):
            raise UsageError(f"{setting} = {path!r}: its objects can't be called; give the class a __call__", code="import")
        is_async = inspect.iscoroutinefunction(call.__call__)
    else:
        call = functools.partial(target, **arguments) if arguments else target
        is_async = inspect.iscoroutinefunction(target)
    version = getattr(target, "version", None)
    name = f"{path}@{version}" if isinstance(version, str | int) else path
    return Verifier(name, call, is_async)


def sample_of(trajectory: Trajectory, tokenizer: Tokenizer) -> Sample:
    """What a verifier sees of a trajectory."""
    start = int(np.argmax(trajectory.loss_mask))
    return Sample(
        prompt_tokens=trajectory.tokens[:start],
        response_tokens=trajectory.tokens[start:],
        policy_mask=trajectory.loss_mask[start:],
        finish=trajectory.finish,
        reference=trajectory.reference,
        prompt_ref=trajectory.prompt_ref,
        tokenizer=tokenizer,
        group=trajectory.group,
        sample=trajectory.sample,
    )


def check_reward(result: object, name: str) -> Reward:
    """`result` as a finite `Reward`; `VerifierError` where it isn't one."""
    reward = result if isinstance(result, Reward) else None
    if reward is None:
        if isinstance(result, bool | int | float | np.number | np.bool_):
            reward = Reward(float(result))
        elif isinstance(result, Awaitable):
            raise VerifierError(f"{name} returned an awaitable; declare it with async def")
        else:
            raise VerifierError(f"{name} returned a {type(result).__name__}; return a float or a Reward")
    for part, value in (("the reward", reward.value), *reward.components.items()):
        try:
            finite = math.isfinite(value)
        except TypeError:
            finite = False
        if not finite:
            raise VerifierError(f"{name}: {part} is {value!r}; only finite numbers can be trained on")
    return Reward(float(reward.value), {key: float(value) for key, value in reward.components.items()})


def check_rewards(results: object, count: int, name: str) -> list[Reward]:
    """A group verifier's answer as `count` rewards; `VerifierError` where it isn't that."""
    if not isinstance(results, Sequence | np.ndarray) or isinstance(results, str | bytes):
        raise VerifierError(f"{name} returned a {type(results).__name__}; return a list with one reward for each sample")
    if len(results) != count:
        raise VerifierError(f"{name} returned {len(results)} rewards for {count} samples")
    return [check_reward(result, name) for result in results]


def _check_arguments(target: Any, arguments: dict[str, Any], path: str, setting: str) -> None:
    """A misspelt argument is found before the run starts, not at its first sample."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return
    try:
        if inspect.isclass(target):
            signature.bind(**arguments)
        else:
            signature.bind(object(), **arguments)
    except TypeError as error:
        where = setting.rpartition(".")[0]
        raise UsageError(f"{setting} = {path!r} with {where}.arguments {sorted(arguments)}: {error}", code="import") from None
