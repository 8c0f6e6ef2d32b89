"""The run's prompt sources and rules, once the base model's files are in the store."""

from __future__ import annotations

from typing import Any

from towline.buffer.rules import Rules, rules_from
from towline.buffer.view import Sources
from towline.config import Settings, import_object
from towline.environment.prompts import PromptSource
from towline.errors import TowlineError, UsageError
from towline.store.log import Log
from towline.store.objects import ObjectStore
from towline.store.versions import base_files
from towline.verifiers.model_tokenizer import prompt_tokenizer, stop_tokens

EVAL_SEED = 1_000_003
"""Added to run.seed for the eval source, so that the two sources don't share an order by accident."""


def load_run(settings: Settings, objects: ObjectStore, log: Log) -> tuple[Rules, Sources]:
    """Rules and prompt sources of the run. Blocks; entry 0 must stand. `UsageError` says which setting is wrong."""
    files = base_files(objects, log)
    tokenizer = prompt_tokenizer(files)
    prompts, seed = settings.prompts, settings.run.seed
    train = _source("prompts.source", prompts.source, tokenizer, seed, prompts.arguments)
    if prompts.eval_source is not None:
        held_out = _source("prompts.eval_source", prompts.eval_source, tokenizer, seed + EVAL_SEED, prompts.eval_arguments)
    else:
        arguments = prompts.arguments | prompts.eval_arguments
        held_out = _source("prompts.source", prompts.source, tokenizer, seed + EVAL_SEED, arguments)
    return rules_from(settings, stop_token_ids=stop_tokens(files)), Sources(train, held_out)


def _source(setting: str, path: str, tokenizer: Any, seed: int, arguments: dict[str, Any]) -> PromptSource:
    factory = import_object(path, setting)
    try:
        source: PromptSource = factory(tokenizer, seed=seed, **arguments)
        length = len(source)
    except TowlineError:
        raise
    except Exception as error:
        raise UsageError(f"{setting} = {path!r} failed: {type(error).__name__}: {error}", code="prompt_source") from error
    if length < 1:
        raise UsageError(f"{setting} = {path!r} has no prompts", code="prompts_empty")
    return source
