"""reasoning-gym's procedural tasks as prompts: `prompts.source = "towline.environment.reasoning_gym_prompts:tasks"`.

Needs `pip install reasoning-gym` where the buffer runs, and, for `towline.verifiers.reasoning_gym:score`, where reward does.
"""

from __future__ import annotations

from typing import Any

from towline.environment.prompts import PromptSource, Shuffled, from_rows
from towline.errors import UsageError


def tasks(
    tokenizer: Any,
    *,
    seed: int,
    task: str,
    size: int = 1000,
    config: dict[str, Any] | None = None,
    suffix: str = "",
    shuffle: bool = False,
    epochs: int | None = None,
    chat_template: bool = False,
) -> PromptSource:
    """`size` entries of the dataset `task` with its own `config`, generated from `seed` as they're drawn; `suffix` is appended
    to each question. The reference says how an entry is made again, so that the verifier scores by the task's own rules."""
    dataset = create(task, size, seed, config or {})

    class Rows(list[dict[str, Any]]):
        def __len__(self) -> int:
            return size

        def __getitem__(self, index: Any) -> Any:
            entry = dataset[int(index)]
            made_by = {"task": task, "size": size, "seed": seed, "config": config or {}, "index": int(index)}
            return {"prompt": entry["question"] + suffix, "answer": str(entry["answer"]), "reasoning_gym": made_by}

    source: Shuffled | PromptSource = from_rows(
        task, Rows(), tokenizer, seed=seed, shuffle=shuffle, epochs=epochs, chat_template=chat_template
    )
    return source


def create(task: str, size: int, seed: int, config: dict[str, Any]) -> Any:
    """reasoning-gym's dataset; `UsageError` where it isn't installed or refuses the configuration."""
    try:
        import reasoning_gym
    except ImportError:
        raise UsageError("reasoning-gym isn't installed: pip install reasoning-gym", code="prompts_reasoning_gym") from None
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise UsageError(f"reasoning-gym refuses task {task!r} with {config}: {error}", code="prompts_reasoning_gym") from error
