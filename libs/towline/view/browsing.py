"""The pages about single samples and messages: the list of trajectories, one's whole life, dead letters.

Lists come from what was read; what they show of a trajectory's text, and a life, is fetched for the page that is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from towline.bus.client import Message
from towline.bus.topology import CONTROL, DEAD, TRAJECTORY
from towline.contract.control import ReissueRecord, TaskRecord, decode_control
from towline.contract.groups import EXTERNAL, is_external, parse_group
from towline.contract.trajectory import Trajectory, decode_trajectory
from towline.errors import MalformedError, MissingError, TowlineError
from towline.trace.gather import trace
from towline.trace.life import Life
from towline.verifiers.tokenizer import LazyTokenizer, stored_tokenizer
from towline.view.answers import (
    LetterContent,
    LetterRow,
    Letters,
    TokenColumns,
    Trajectories,
    TrajectoryLife,
    TrajectoryRow,
    sample_id,
)
from towline.view.letters import Letter, content_of
from towline.view.narrow import NarrowSource
from towline.view.overview import reading_share
from towline.view.reading import Reading
from towline.view.samples import SampleFilter, SampleRow

MOST_ROWS = 100
"""Of a page."""
_LOOK_AT_MOST = 1024
"""Samples whose environment is looked up for one page."""
_PREVIEWS, _ENVIRONMENTS = 4000, 20_000
_PROMPT_TOKENS, _RESPONSE_TOKENS, _CHARACTERS = 48, 64, 160
_TOKENIZER_AGAIN_SECONDS = 30.0


class Browser:
    """Over one reading. Keeps a bounded number of texts and environments that it has looked up."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._previews: OrderedDict[int, tuple[str | None, str | None]] = OrderedDict()
        self._environments: OrderedDict[int, str | None] = OrderedDict()
        source = reading.feed.source
        self._tokenizer: LazyTokenizer = stored_tokenizer(source.objects, source.settings.run.name)
        self._tokenizer_tried_at = float("-inf")
        self._tokenizer_usable = False

    async def trajectories(self, wanted: SampleFilter, *, environment: str | None, limit: int) -> Trajectories:
        """The newest first, from `wanted.before` on."""
        reading, limit = self._reading, min(limit, MOST_ROWS)
        if wanted.state == "generated":
            rows, total, after = await self._unscored(wanted, limit)
        elif environment is not None:
            rows, total, after = await self._of_environment(wanted, environment, limit)
        else:
            rows, total = reading.samples.select(wanted, limit + 1, reading.consumed())
            after = rows[limit - 1].sequence if len(rows) > limit else None
            rows = rows[:limit]
        environments = await self._environments_of(rows)
        previews = await self._previews_of([row.sequence for row in rows])
        return Trajectories(
            rows=[
                TrajectoryRow(
                    id=sample_id(row.group, row.sample), sequence=row.sequence, lane=row.lane, state=row.state, at=row.at,
                    reward=row.reward, step=row.step, version_start=row.version_start, version_end=row.version_end,
                    policy_tokens=row.policy_tokens, total_tokens=row.total_tokens, finish=row.finish,
                    environment=environments[row.group], prompt=previews[row.sequence][0], response=previews[row.sequence][1],
                )
                for row in rows
            ],
            total=total, next=after, kept=reading.samples.newest - reading.samples.oldest + 1, newest=reading.samples.newest,
            reading=reading_share(reading),
        )  # fmt: skip

    async def trajectory(self, group: int, sample: int) -> TrajectoryLife:
        """`MissingError` where the run knows no such sample."""
        narrow = await NarrowSource.of(self._reading, group, sample)
        life = await trace(narrow, group, sample, await self._tokens())
        return await asyncio.to_thread(_life, life)

    def letters(self, *, before: int | None, stage: str | None, limit: int) -> Letters:
        limit = min(limit, MOST_ROWS)
        found = [
            letter
            for letter in reversed(self._reading.letters)
            if (before is None or letter.sequence < before) and (stage is None or letter.stage == stage)
        ]
        rows = [self._letter(letter) for letter in found[:limit]]
        after = rows[-1].sequence if len(found) > limit else None
        return Letters(rows=rows, next=after, stages=dict(self._reading.dead_by_stage))

    async def letter(self, sequence: int) -> LetterContent:
        """`MissingError` where there's none."""
        letter = next((one for one in self._reading.letters if one.sequence == sequence), None)
        message = (await self._reading.feed.source.get_many(DEAD, [sequence]))[0] if letter is not None else None
        if letter is None or message is None:
            raise MissingError(f"no dead letter {sequence} among the newest", code="letter_missing")
        return LetterContent(row=self._letter(letter), content=await asyncio.to_thread(content_of, message.data))

    def _letter(self, letter: Letter) -> LetterRow:
        words = self._reading.feed.source.topology.relative(str(letter.context.get("subject", ""))).split(".")
        named = words[1:] if words[0] in ("trajectory", "partial") else words[2:] if words[0] == "outcome" else []
        group = parse_group(named[0]) if len(named) == 2 and named[1].isdecimal() else None
        return LetterRow(
            sequence=letter.sequence, stage=letter.stage, at=letter.at, nbytes=letter.nbytes, reason=letter.reason,
            context=letter.context, sample=None if group is None else sample_id(group, int(named[1])),
        )  # fmt: skip

    # What is looked up

    async def _unscored(self, wanted: SampleFilter, limit: int) -> tuple[list[SampleRow], int | None, int | None]:
        samples = self._reading.samples
        sequences = samples.unscored(wanted.before or samples.newest + 1, limit + 1)
        rows = []
        for message in await self._reading.feed.source.get_many(TRAJECTORY, sequences[:limit]):
            found = None if message is None else await asyncio.to_thread(_decoded, message)
            if message is not None and found is not None:
                rows.append(_unscored_row(message, found))
        kept = [
            row for row in rows
            if (wanted.lane in (None, row.lane)) and wanted.group in (None, row.group) and wanted.finish in (None, row.finish)
        ]  # fmt: skip
        return kept, None, sequences[limit - 1] if len(sequences) > limit else None

    async def _of_environment(
        self, wanted: SampleFilter, environment: str, limit: int
    ) -> tuple[list[SampleRow], int | None, int | None]:
        """Looks at a bounded number of samples; where that doesn't fill the page, the next one goes on."""
        looked, total = self._reading.samples.select(wanted, _LOOK_AT_MOST, self._reading.consumed())
        found: list[SampleRow] = []
        for start in range(0, len(looked), limit):
            part = looked[start : start + limit]
            names = await self._environments_of(part)
            found += [row for row in part if names[row.group] == environment]
            if len(found) >= limit:
                more = len(found) > limit or start + limit < len(looked) or len(looked) == _LOOK_AT_MOST
                return found[:limit], None, found[limit - 1].sequence if more else None
        return found, None, looked[-1].sequence if len(looked) == _LOOK_AT_MOST and total > _LOOK_AT_MOST else None

    async def _environments_of(self, rows: Sequence[SampleRow]) -> dict[int, str | None]:
        """Of each group, by one of its tasks; None where that is purged."""
        known = {row.group: self._environments[row.group] for row in rows if row.group in self._environments}
        asked = {row.group: row.task_sequence for row in rows if row.group not in known}
        tasks = {group: sequence for group, sequence in asked.items() if sequence and not is_external(group)}
        messages = await self._reading.feed.source.get_many(CONTROL, list(tasks.values()))
        for group, message in zip(tasks, messages, strict=True):
            self._environments[group] = _environment(message)
        while len(self._environments) > _ENVIRONMENTS:
            self._environments.popitem(last=False)
        return {
            row.group: EXTERNAL if is_external(row.group) else known.get(row.group, self._environments.get(row.group))
            for row in rows
        }

    async def _previews_of(self, sequences: Sequence[int]) -> dict[int, tuple[str | None, str | None]]:
        known = {sequence: self._previews[sequence] for sequence in sequences if sequence in self._previews}
        missing = [sequence for sequence in sequences if sequence not in known]
        if missing and (tokenizer := await self._tokens()) is not None:
            messages = await self._reading.feed.source.get_many(TRAJECTORY, missing)
            fresh = await asyncio.to_thread(lambda: [_preview(message, tokenizer) for message in messages])
            for sequence, preview in zip(missing, fresh, strict=True):
                known[sequence] = self._previews[sequence] = preview
            while len(self._previews) > _PREVIEWS:
                self._previews.popitem(last=False)
        return {sequence: known.get(sequence, (None, None)) for sequence in sequences}

    async def _tokens(self) -> LazyTokenizer | None:
        """The model's tokenizer; None where it can't be read (now): token IDs are the truth anyway."""
        if not self._tokenizer_usable and time.monotonic() - self._tokenizer_tried_at > _TOKENIZER_AGAIN_SECONDS:
            self._tokenizer_tried_at = time.monotonic()
            try:
                await asyncio.to_thread(lambda: self._tokenizer.loaded)
                self._tokenizer_usable = True
            except TowlineError:
                return None
        return self._tokenizer if self._tokenizer_usable else None


def _decoded(message: Message) -> Trajectory | None:
    try:
        return decode_trajectory(message.data)
    except MalformedError:
        return None


def _unscored_row(message: Message, found: Trajectory) -> SampleRow:
    return SampleRow(
        sequence=message.sequence, group=found.group, sample=found.sample, lane=found.lane, state="generated", at=message.at,
        reward=None, step=None, version_start=found.version_start, version_end=found.version_end,
        policy_tokens=found.policy_tokens, total_tokens=int(found.tokens.size), finish=found.finish,
        task_sequence=found.task_sequence,
    )  # fmt: skip


def _environment(message: Message | None) -> str | None:
    if message is None:
        return None
    try:
        record = decode_control(message.data)
    except MalformedError:
        return None
    return record.task.environment if isinstance(record, TaskRecord | ReissueRecord) else None


def _preview(message: Message | None, tokenizer: LazyTokenizer) -> tuple[str | None, str | None]:
    """The prompt's end and the response's beginning."""
    found = None if message is None else _decoded(message)
    if found is None:
        return None, None
    start = int(found.loss_mask.argmax())
    prompt = found.tokens[max(start - _PROMPT_TOKENS, 0) : start].tolist()
    response = found.tokens[start : start + _RESPONSE_TOKENS].tolist()
    return (
        tokenizer.decode(prompt, skip_special_tokens=False)[-_CHARACTERS:],
        tokenizer.decode(response, skip_special_tokens=False)[:_CHARACTERS],
    )


def _life(life: Life) -> TrajectoryLife:
    plain: dict[str, Any] = life.plain()
    tokens = None
    if life.trajectory is not None:
        own = plain["trajectory"]
        seen = life.trajectory.tokens
        tokens = TokenColumns(
            ids=[token.id for token in seen],
            texts=None if any(token.text is None for token in seen) else [token.text or "" for token in seen],
            logprobs=[token.logprob for token in seen],
        )
        own.pop("tokens")
        own["seed"] = str(own["seed"])
    if plain["prompt"] is not None:
        plain["prompt"].pop("tokens", None)
        if "seed" in plain["prompt"]:
            plain["prompt"]["seed"] = str(plain["prompt"]["seed"])
    plain["group"] = str(plain["group"])
    group_size = min(max(life.group_size, 1), 256)
    return TrajectoryLife(
        id=sample_id(life.group, life.sample), life=plain, tokens=tokens,
        neighbours=[sample_id(life.group, one) for one in range(group_size)],
    )  # fmt: skip
