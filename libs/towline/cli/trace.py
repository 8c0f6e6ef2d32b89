"""`towline trace`: one sample's way, from its prompt to the version that came of it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Annotated

import typer

from towline.cli.source import SourceArgument, open_source
from towline.cli.trajectories import parse_sample
from towline.errors import MissingError, UsageError

if TYPE_CHECKING:
    from towline.trace.life import Life


def trace(
    target: SourceArgument,
    sample: Annotated[str, typer.Argument(metavar="GROUP.SAMPLE", help="As `towline trajectories list` prints it.")],
    all_tokens: Annotated[bool, typer.Option("--all-tokens", help="Of a long response too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """One sample on one screen: prompt, attempts, versions, tokens, reward, batch, the version that came of it, who serves it."""
    group, index = parse_sample(sample)
    life = asyncio.run(_trace(target, group, index))
    if as_json:
        print(json.dumps(life.plain(), default=str))
        return
    from towline.runtime.console import PlainConsole
    from towline.trace.screen import print_life

    print_life(PlainConsole(), life, all_tokens=all_tokens)


async def _trace(target: str, group: int, index: int) -> Life:
    from towline.trace.gather import trace
    from towline.verifiers.tokenizer import LazyTokenizer, stored_tokenizer

    async with open_source(target) as source:
        tokenizer: LazyTokenizer | None = stored_tokenizer(source.objects, source.settings.run.name)
        try:
            await asyncio.to_thread(lambda: tokenizer and tokenizer.loaded)
        except (UsageError, MissingError):
            tokenizer = None  # nothing that reads it is installed: token IDs are the truth anyway
        return await trace(source, group, index, tokenizer)
