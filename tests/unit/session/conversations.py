"""Random conversations over a session, with an engine that says random tokens and a client that spells history its own way.

What the engine was given and what it said is kept here; the session is judged by that alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from towline.contract.task import VersionSpan
from towline.session.boundary import Boundary
from towline.session.tree import Place, Session

PIECES = (
    "hello", " world", "  two  spaces ", "\n\n\nlines\n", "\t", "größe", "東京", "🦔🦔", "a\u0301", "\u200b", "<|im_end|>",
    "[/INST]", "</s>", "<|eot_id|>", "12345", "3.14", "don't", "", " ", "{\"a\": [1, 2]}", "<think>", "</think>", "\r\n",
    "ﬁ", "x" * 40,
)  # fmt: skip


def text(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 5)))


@dataclass
class Call:
    """One request as the engine had it."""

    prompt: tuple[int, ...]
    said: list[int]
    logprobs: list[float]
    version: int


@dataclass
class Talk:
    """A conversation. `messages` is what the client believes was said."""

    session: Session
    rng: random.Random
    vocabulary: int
    calls: list[Call] = field(default_factory=list)
    messages: list[dict] = field(default_factory=list)

    @property
    def boundary(self) -> Boundary:
        return self.session.boundary

    def say(self) -> None:
        """A question or a tool's answer."""
        after_answer = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        role = "tool" if after_answer and self.rng.random() < 0.3 else "user"
        self.messages.append({"role": role, "content": text(self.rng)})

    def turn(self, tools: list | None = None) -> Call:
        """The client sends everything, the engine answers, the client hears it."""
        place = self.session.place(self.spelled(), tools)
        call = self.answer(place)
        content = self.boundary.tokenizer.decode(call.said, skip_special_tokens=True)
        message = {"role": "assistant", "content": content}
        finish = "stop" if call.said[-1] in self.boundary.ends else "length"
        cut = self.rng.randint(0, len(call.said))
        spans = [
            VersionSpan(a, b, v, c)
            for a, b, v, c in ((0, cut, call.version, "start"), (cut, len(call.said), call.version + 1, "retract"))
            if a < b
        ]
        spans[0] = VersionSpan(spans[0].start, spans[0].end, spans[0].version, "start")
        self.session.said(place, call.said, call.logprobs, spans, finish, message)
        self.messages.append(message)
        self.calls.append(call)
        return call

    def answer(self, place: Place) -> Call:
        """Any tokens at all, bytes of half a character and special ones too; ended by an end token, or cut off."""
        ends = sorted(self.boundary.ends)
        said = [self.rng.randrange(self.vocabulary) for _ in range(self.rng.randint(0, 12))]
        said = [token for token in said if token not in self.boundary.ends]
        if not said or self.rng.random() < 0.8:
            said.append(self.rng.choice(ends))
        return Call(place.prompt, said, [-self.rng.random() - 0.01 for _ in said], self.rng.randint(0, 9))

    def spelled(self) -> list[dict]:
        """History as clients send it: as it was, or with answers' white space gone, or their reasoning dropped."""
        way = self.rng.choice(("same", "same", "strip", "reasoning", "parts", "null"))
        sent = []
        for message in self.messages:
            content, role = message["content"], message["role"]
            if role == "assistant" and way == "strip":
                content = content.strip()
            elif role == "assistant" and way == "reasoning":
                content = content.rpartition("</think>")[2]
            elif way == "parts":
                content = [{"type": "text", "text": content}]
            elif way == "null" and not content:
                content = None
            sent.append({"role": role, "content": content})
        return sent


def talks(boundary: Boundary, vocabulary: int, count: int, seed: int) -> Iterator[Talk]:
    for index in range(count):
        yield Talk(Session(boundary), random.Random(seed * 1_000_003 + index), vocabulary)
