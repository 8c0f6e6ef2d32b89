"""What a recorded run's samples were like, as a small JSON file: lengths, turns, speeds, ends, failures, group by group.

The samples themselves are kept, not fits to them, and a group is drawn whole: so whatever goes together in the run (the lengths
of a group's samples, a long sample and its many turns, a slow one and its length) goes together in what is drawn. All of it
follows from the caller's seed. `towline loadtest record` writes it; the synthetic engine, its environment and the simulator
read it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from towline.contract.trajectory import FinishReason
from towline.errors import UsageError

SCHEMA = 1
Kind = Literal["towline-recording"]
_MARK = (31_991, 31_997, 31_999)
"""How a prompt begins that says which recorded sample it asks for; three random tokens do so once in 10^13 prompts."""
_DIGIT = 30_000
MARK_TOKENS = len(_MARK) + 3
"""A marked prompt is at least so long."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What the policy said, and how many tokens the environment answered; 0 after the last one."""

    policy: int
    environment: int = 0


class Recorded(msgspec.Struct, frozen=True, array_like=True):
    """One sample. Tokens and seconds."""

    prompt: int
    turns: tuple[Turn, ...]
    tool_seconds: float
    """Of all its tools together: what wasn't the engine's between pull and end."""
    tokens_per_second: float
    """Of the engine, while it generated; 0 where the source doesn't tell."""
    finish: FinishReason

    @property
    def policy_tokens(self) -> int:
        return sum(turn.policy for turn in self.turns)

    @property
    def ends_by_itself(self) -> bool:
        """Whether its last turn ended by a stop token. What was cut off is drawn as long as it got, not as it would have got."""
        return self.finish not in ("length", "deadline")


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The whole. `groups` has at least one sample."""

    kind: Kind = "towline-recording"
    schema: int = SCHEMA
    source: str
    samples: int
    """That the run had; `groups` may hold fewer."""
    failures: dict[str, int] = {}
    """Failed attempts by stage."""
    group_size: int
    """Of the largest group."""
    groups: list[list[Recorded]]

    def failed_share(self, *, environment: bool) -> float:
        """Of all attempts: those that failed in the environment, or everywhere else."""
        failed = sum(count for stage, count in self.failures.items() if (stage == "environment") is environment)
        return failed / max(self.samples + sum(self.failures.values()), 1)

    def failed_turns(self, turns: int, *, environment: bool) -> float:
        """The chance of each turn that makes that share of attempts of so many turns."""
        return float(1 - (1 - self.failed_share(environment=environment)) ** (1 / turns))

    def group_of(self, chance: random.Random) -> int:
        """A recorded group's place, each as likely as it has samples."""
        while True:  # by rejection: a group of k samples is taken k times in `group_size`
            group = chance.randrange(len(self.groups))
            if chance.randrange(self.group_size) < len(self.groups[group]):
                return group

    def places(self, group: int, size: int, chance: random.Random) -> list[int]:
        """Which of the group's samples stand for `size` new ones: each once before any comes twice."""
        order = list(range(len(self.groups[group])))
        chance.shuffle(order)
        return [order[place % len(order)] for place in range(size)]

    def turn_of(self, seed: int) -> Recorded:
        """For a request of which nothing else is known: one turn of one sample, by its seed."""
        chance = random.Random(f"recorded/{seed}")
        sample = chance.choice(self.groups[self.group_of(chance)])
        return msgspec.structs.replace(sample, turns=(Turn(chance.choice(sample.turns).policy),), tool_seconds=0.0)

    def asked(self, tokens: Sequence[int], seed: int) -> Recorded:
        """The sample that a prompt's mark names, or one by the seed."""
        if len(tokens) >= MARK_TOKENS and tuple(tokens[: len(_MARK)]) == _MARK:
            high, low, place = tokens[len(_MARK) : MARK_TOKENS]
            group = high * _DIGIT + low
            if group < len(self.groups) and place < len(self.groups[group]):
                return self.groups[group][place]
        return self.turn_of(seed)


def marked(prompt: Sequence[int], group: int, place: int) -> list[int]:
    """The prompt, beginning with the mark of a recorded group's sample."""
    return [*_MARK, group // _DIGIT, group % _DIGIT, place, *prompt[MARK_TOKENS:]]


@functools.lru_cache(maxsize=4)
def read_recording(path: str) -> Recording:
    """Once a process: hundreds of engines share it. `UsageError` where it isn't one."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Recording)
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; `towline loadtest record RUN --out FILE` makes one", code="recording"
        ) from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: not a recording: {error}", code="recording") from None
    if found.schema != SCHEMA:
        raise UsageError(f"{path}: schema {found.schema}; this Towline reads {SCHEMA}", code="recording")
    whole = all(0 < len(group) <= found.group_size and all(sample.turns for sample in group) for group in found.groups)
    if not found.groups or not whole:
        raise UsageError(
            f"{path}: a recording without samples, a sample without turns, or a group over group_size", code="recording"
        )
    return found
