"""The reward of a reasoning-gym task, by the task's own rules, for prompts of towline.environment.reasoning_gym_prompts."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from towline.environment.reasoning_gym_prompts import create
from towline.errors import VerifierError
from towline.verifiers.base import Sample

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(sample: Sample) -> float:
    """In [0, 1]: of what stands between the last <answer> tags, else of the whole response, stripped."""
    made_by = sample.reference.get("reasoning_gym")
    if not isinstance(made_by, dict):
        raise VerifierError("the sample's reference says no reasoning-gym task: use reasoning_gym_prompts as the source")
    dataset = _dataset(msgspec.json.encode({key: made_by[key] for key in ("task", "size", "seed", "config")}, order="sorted"))
    found = _ANSWER.findall(sample.text)
    answer = (found[-1] if found else sample.text).strip()
    return float(dataset.score_answer(answer=answer, entry=dataset[int(made_by["index"])]))


@lru_cache(maxsize=64)
def _dataset(made_by: bytes) -> Any:
    fields = msgspec.json.decode(made_by)
    return create(fields["task"], fields["size"], fields["seed"], fields["config"])
