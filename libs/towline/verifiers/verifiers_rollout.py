"""The reward of a `verifiers` environment, by its own rubric, for samples of towline.environment.verifiers_rollout.

Rewards come from the trajectory alone: the environment's rollout is run again with the policy's turns, and its rubric scores
what it comes to. So the environment must answer the same turns in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from towline.environment.verifiers_rollout import Conversation, load, row
from towline.errors import VerifierError
from towline.verifiers.base import Reward, Sample


class VerifiersReward:
    """`reward.function`; its arguments are `environment` and `arguments`, as the prompts'."""

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._environment = load(environment, arguments or {})

    async def __call__(self, sample: Sample) -> Reward:
        example = row(self._environment, sample.reference["split"], sample.reference["row"])
        conversation = Conversation(self._environment, example)
        try:
            await conversation.begin()
            turns = list(_turns(sample))
            for number, tokens in enumerate(turns, 1):
                last = number == len(turns)
                text = sample.tokenizer.decode(tokens, skip_special_tokens=True)
                said = await conversation.say(text, truncated=last and sample.finish in ("length", "deadline"))
                if said is None and not last:
                    raise VerifierError("the environment ended earlier than it did for the worker", code="verifiers_replay")
            state = conversation.state
            if state is None:
                return Reward(0.0, {"unfinished": 1.0})
            await self._environment.rubric.score_rollout(state)
            return Reward(float(state["reward"]), {name: float(value) for name, value in state["metrics"].items()})
        finally:
            await conversation.close()


def _turns(sample: Sample) -> Iterator[list[int]]:
    """The policy's turns, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.policy_mask.astype(np.int8), [0]])))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield sample.response_tokens[start:end].tolist()
