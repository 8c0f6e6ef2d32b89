"""A session: an append-only tree of turns over token IDs. What was sampled stays as it was sampled.

A node holds the tokens that its author added; a path from the root is what the engine saw and sampled, token by token. Requests
bring the conversation back as messages; `place` finds where they go on from. Nothing is ever taken away: a rollback or an edited
history grows another branch, and a client that spells history differently changes nothing of it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from towline.contract.task import VersionSpan
from towline.errors import ConflictError, MissingError, UsageError
from towline.session.boundary import Boundary
from towline.session.messages import Message, canonical, likeness, plain

Kind = Literal["prompt", "policy", "environment", "tool"]
ROOT = -1


@dataclass(frozen=True, slots=True)
class Node:
    """`tokens` follow those of `parent` (ROOT: none do). `messages` are the ones that they write; a policy node's is the one
    that the client was told. `logprobs` and `spans` (relative to the node) stand where the policy chose."""

    parent: int
    kind: Kind
    tokens: tuple[int, ...]
    messages: tuple[dict[str, Any], ...]
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    finish: Literal["stop", "length", ""] = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn begins: the policy answers after `prompt`, the tokens of the path to `node`."""

    node: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    nodes: int = 4096
    tokens: int = 1 << 20
    """Over all branches."""


@dataclass(slots=True)
class Session:
    """One conversation and its branches."""

    boundary: Boundary
    limits: Limits = field(default_factory=Limits)
    nodes: list[Node] = field(default_factory=list)
    head: int = ROOT
    """The node that the last turn ended with, or that was rolled back to."""
    tools: str = "null"
    """The tools of the first prompt, canonical JSON; they're told once, there."""
    mismatches: Counter[str] = field(default_factory=Counter)
    """How clients' histories differed from what was said: whitespace, reasoning, edited, foreign, tools, opening."""

    def place(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Place:
        """Take the request's messages in and say where the policy goes on. Grows the tree by what is new in them."""
        sent = [plain(message) for message in messages]
        told = _tools(tools)
        at, used = self._known(sent, told)
        if at == ROOT:
            if self.nodes:
                self.mismatches["tools" if told != self.tools and self._known(sent, None)[0] != ROOT else "opening"] += 1
            return self._opened(sent, tools, told)
        rest = sent[used:]
        if not rest:
            node = self.nodes[at]
            # Ends with an answer: the policy is asked to go on where nothing new was said, which no template writes.
            if node.kind == "policy":
                raise UsageError("messages: the last one is the policy's own answer; add one that asks for more", code="messages")
            return self._placed(at)
        return self._placed(self._grow(at, rest))

    def said(
        self,
        place: Place,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[VersionSpan],
        finish: Literal["stop", "length"],
        message: Message,
    ) -> int:
        """The policy's turn at `place`, as sampled; `message` is what the client is told. The new node."""
        if not tokens or len(tokens) != len(logprobs) or sum(span.end - span.start for span in spans) != len(tokens):
            raise UsageError("a turn needs tokens, a logprob and a version for each of them", code="turn")
        made = Node(place.node, "policy", tuple(tokens), (dict(message),), tuple(logprobs), tuple(spans), finish)
        return self._add(made)

    def rollback(self) -> int:
        """Forget the last turn: the head goes to where it was asked. The tree keeps it."""
        if self.head == ROOT or self.nodes[self.head].kind != "policy":
            raise ConflictError("there is no turn to roll back: the last thing said isn't the policy's", code="rollback")
        self.head = self.nodes[self.head].parent
        return self.head

    def path(self, node: int | None = None) -> list[int]:
        """Node numbers from the root to `node` (None: the head)."""
        at = self.head if node is None else node
        if not ROOT <= at < len(self.nodes):
            raise MissingError(f"the session has no node {at}", code="session_node")
        found = []
        while at != ROOT:
            found.append(at)
            at = self.nodes[at].parent
        return found[::-1]

    def tokens(self, node: int | None = None) -> list[int]:
        return [token for number in self.path(node) for token in self.nodes[number].tokens]

    def leaves(self) -> list[int]:
        """Policy turns that nothing follows: each is the end of a branch."""
        parents = {node.parent for node in self.nodes}
        return [n for n, node in enumerate(self.nodes) if node.kind == "policy" and n not in parents]

    def _known(self, sent: list[dict[str, Any]], tools: str | None) -> tuple[int, int]:
        """The deepest node whose path the messages repeat, and how many of them that takes. Later branches come first."""
        best, taken = ROOT, 0
        if tools is not None and tools != self.tools:
            return best, taken
        children: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            children.setdefault(node.parent, []).append(number)
        stack = [(ROOT, 0)]
        while stack:
            at, used = stack.pop()
            if at != ROOT and (used, at) > (taken, best):
                best, taken = at, used
            for number in children.get(at, ()):
                end = used + len(self.nodes[number].messages)
                if self._repeats(self.nodes[number], sent[used:end]):
                    stack.append((number, end))
        if best != ROOT:
            self._count(self.path(best), sent)
        return best, taken

    def _repeats(self, node: Node, sent: Sequence[Message]) -> bool:
        if len(sent) != len(node.messages):
            return False
        if node.kind == "policy":
            return likeness(node.messages[0], sent[0]) != "other"
        return [canonical(message) for message in node.messages] == [canonical(message) for message in sent]

    def _count(self, path: Sequence[int], sent: Sequence[Message]) -> None:
        at = 0
        for number in path:
            node = self.nodes[number]
            if node.kind == "policy":
                kind = likeness(node.messages[0], sent[at])
                if kind != "same":
                    self.mismatches[kind] += 1
            at += len(node.messages)

    def _opened(self, sent: list[dict[str, Any]], tools: Sequence[Any] | None, told: str) -> Place:
        tokens = self.boundary.opening(sent, tools)
        if not self.nodes:
            self.tools = told
        return self._placed(self._add(Node(ROOT, "prompt", tuple(tokens), tuple(sent))))

    def _grow(self, at: int, rest: list[dict[str, Any]]) -> int:
        """New messages behind node `at`. Answers among them that the policy never gave are environment tokens."""
        node = self.nodes[at]
        if node.kind != "policy":
            return self._branch(at, rest)
        if any(message["role"] == "assistant" for message in rest):
            self.mismatches["foreign"] += 1
        kind: Kind = "tool" if rest[0]["role"] == "tool" else "environment"
        return self._add(Node(at, kind, tuple(self.boundary.next(node.tokens, rest)), tuple(rest)))

    def _branch(self, at: int, rest: list[dict[str, Any]]) -> int:
        """The messages part from the tree behind a prompt: the last turn before is written with its answer as sent."""
        self.mismatches["edited" if rest[0]["role"] == "assistant" else "foreign"] += 1
        node = self.nodes[at]
        before = [*node.messages, *rest]
        if node.parent == ROOT:
            return self._add(Node(ROOT, "prompt", tuple(self.boundary.opening(before, _untold(self.tools))), tuple(before)))
        sampled = self.nodes[node.parent].tokens
        return self._add(Node(node.parent, "environment", tuple(self.boundary.next(sampled, before)), tuple(before)))

    def _placed(self, node: int) -> Place:
        self.head = node
        return Place(node, tuple(self.tokens(node)))

    def _add(self, node: Node) -> int:
        total = sum(len(known.tokens) for known in self.nodes) + len(node.tokens)
        if len(self.nodes) >= self.limits.nodes or total > self.limits.tokens:
            raise UsageError(
                f"the session is full ({len(self.nodes)} turns, {total:,} tokens; {self.limits.nodes} and {self.limits.tokens:,} "
                "are allowed): finish it and begin another",
                code="session_full",
            )
        self.nodes.append(node)
        self.head = len(self.nodes) - 1
        return self.head


def _tools(tools: Sequence[Any] | None) -> str:
    return json.dumps(list(tools) if tools else None, sort_keys=True, ensure_ascii=False)


def _untold(tools: str) -> list[Any] | None:
    found: list[Any] | None = json.loads(tools)
    return found
