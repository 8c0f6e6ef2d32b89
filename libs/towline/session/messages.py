"""Chat messages as a session compares them: by what they say, not by how a client spells them.

A client sends the conversation back whole, often changed in ways that don't matter: trailing white space gone, reasoning
dropped, `null` instead of nothing, tool calls' JSON laid out anew. `canonical` takes such spelling away.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from towline.errors import UsageError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
Message = Mapping[str, Any]
Likeness = Literal["same", "whitespace", "reasoning", "other"]


def check(messages: Any) -> list[dict[str, Any]]:
    """The messages of a request; `UsageError` names what is wrong with which."""
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages: give a list with at least one message", code="messages")
    if len(messages) > MAX_MESSAGES:
        raise UsageError(f"messages: {len(messages)} of them, at most {MAX_MESSAGES} are taken", code="messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UsageError(f"{where}: a role of {', '.join(ROLES)} is needed", code="messages")
        if not isinstance(message.get("content"), str | list | None):
            raise UsageError(f"{where}.content: a string or a list of text parts is needed", code="messages")
        text(message, where)
    return [dict(message) for message in messages]


def text(message: Message, where: str = "message") -> str:
    """The content as one string; parts other than text are refused."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"{where}.content: only text parts are taken here", code="messages")
        parts.append(part["text"])
    return "".join(parts)


def plain(message: Message) -> dict[str, Any]:
    """As every template takes it: the content is a string."""
    return {**message, "content": text(message)}


def canonical(message: Message) -> str:
    """Equal for messages that say the same: role, text, name, tool calls (arguments as JSON values) and the call answered."""
    found: dict[str, Any] = {"role": message["role"], "content": text(message)}
    for key in ("name", "tool_call_id"):
        if message.get(key):
            found[key] = message[key]
    calls = [_call(call) for call in message.get("tool_calls") or []]
    if calls:
        found["tool_calls"] = calls
    try:
        return json.dumps(found, ensure_ascii=False, sort_keys=True, default=str)
    except RecursionError:
        raise UsageError("messages: a call's arguments are nested too deeply: send them flatter", code="messages") from None


def told(message: Message) -> dict[str, Any]:
    """A message as its client knows it."""
    return {key: value for key, value in message.items() if key != "otherwise"}


def likeness(said: Message, sent: Message) -> Likeness:
    """How `sent` back differs from what was `said`: not at all, in white space, by lost reasoning, or in what it says.

    `said["otherwise"]`: other ways to write the same answer, as its text with the tool calls in it; the nearest one counts.
    """
    found = [_likeness(form, sent) for form in (said, *said.get("otherwise", ()))]
    return min(found, key=get_args(Likeness).index)


def _likeness(said: Message, sent: Message) -> Likeness:
    if canonical(said) == canonical(sent):
        return "same"
    if _trimmed(said) == _trimmed(sent):
        return "whitespace"
    if _trimmed(said, reasoning=False) == _trimmed(sent, reasoning=False):
        return "reasoning"
    return "other"


def common(known: Sequence[str], sent: Sequence[str]) -> int:
    """How many canonical messages agree from the start on."""
    return next((i for i, (a, b) in enumerate(zip(known, sent, strict=False)) if a != b), min(len(known), len(sent)))


def _trimmed(message: Message, *, reasoning: bool = True) -> str:
    content = text(message)
    if not reasoning and "</think>" in content:
        content = content.rpartition("</think>")[2]
    calls = message.get("tool_calls")
    return canonical({"role": message["role"], "content": " ".join(content.split()), "tool_calls": calls})


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise UsageError("tool_calls: each needs a function with a name and arguments", code="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what isn't JSON, or too deep, is compared as the text it is
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}
