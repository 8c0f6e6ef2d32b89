"""Tool calls in an answer's text, in the forms that model families write them: Hermes and Qwen, Llama, Mistral.

A text whose calls aren't all well formed has none: it stays the text it is. The sampled tokens are never touched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import xxhash

from towline.gateway.text import overlap
from towline.session.families import FAMILIES

_MOST_NAME = 200
_decoder = json.JSONDecoder(parse_constant=lambda word: _refuse(word))
_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s;]*")
_MISTRAL_NAME = re.compile(r"\s*([A-Za-z0-9_.-]{1,200})(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """`content` is what stands beside the calls."""

    content: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes calls. `parse` gives None where the text has none, or a broken one."""

    name: str
    begins: tuple[str, ...]
    """What a call's text begins with."""
    parse: Callable[[str, Collection[str]], Parsed | None]
    """Of the text and the names of the tools that were told."""
    opening_only: bool = False
    """Calls stand at the text's beginning or nowhere."""
    kept: tuple[str, ...] = ()
    """Special tokens that are a part of the form, so that the text must show them."""

    def plain_until(self, text: str) -> int:
        """Characters at the beginning that are content whatever comes; behind them a call may stand, or space before one."""
        if self.opening_only:
            head = text.lstrip()
            maybe = any(head.startswith(mark) or mark.startswith(head) for mark in self.begins)
            return 0 if maybe else len(text.rstrip())
        ends = [at for mark in self.begins if (at := text.find(mark)) >= 0]
        end = min(ends, default=len(text) - max(overlap(text, mark) for mark in self.begins))
        return len(text[:end].rstrip())


def form_of(tokenizer: Any) -> Form | None:
    """That of the tokenizer's family; None where it isn't known."""
    try:
        family = next(one.name for one in FAMILIES if all(tokenizer.token_to_id(mark) is not None for mark in one.marks))
    except (StopIteration, AttributeError):
        return None
    return _FORMS.get(family)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads one request's answers: its form, and the names of the tools that were told."""

    form: Form
    names: frozenset[str] = field(default_factory=frozenset)

    def parse(self, text: str) -> Parsed | None:
        return self.form.parse(text, self.names)

    def message(self, text: str, seed: str) -> dict[str, Any]:
        """The answer's message as OpenAI writes it. `seed` makes the calls' ids, the same ones for the same answer."""
        parsed = self.parse(text)
        if parsed is None:
            return {"role": "assistant", "content": text}
        return {"role": "assistant", "content": parsed.content or None, "tool_calls": written(parsed, seed)}


def written(parsed: Parsed, seed: str) -> list[dict[str, Any]]:
    """OpenAI's tool_calls. An id has nine letters: Mistral's templates take no others."""
    return [
        {
            "id": xxhash.xxh3_64_hexdigest(f"{seed}/{number}".encode())[:9],
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(parsed.calls)
    ]


def tool_names(tools: Any) -> frozenset[str]:
    """Of OpenAI's `tools`; what has another shape has no name."""
    found = [tool.get("function", tool) for tool in tools or () if isinstance(tool, Mapping)]
    return frozenset(str(one["name"]) for one in found if isinstance(one, Mapping) and isinstance(one.get("name"), str))


def arguments_object(arguments: Any) -> Any:
    """As templates take a call's arguments: the object that the JSON text is; as it came where it is none, or can't be kept."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = _decoder.decode(arguments)
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


# The forms


def _hermes(text: str, names: Collection[str]) -> Parsed | None:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them; the last may be left open."""
    calls, beside, at = list[Call](), list[str](), 0
    while (mark := text.find("<tool_call>", at)) >= 0:
        beside.append(text[at:mark].strip() if beside else text[:mark].rstrip())
        found = _object(text, mark + len("<tool_call>"))
        call = None if found is None else _call(found[0], "arguments")
        if found is None or call is None:
            return None
        at = _end_of(_SPACE, text, found[1])
        if text.startswith("</tool_call>", at):
            at += len("</tool_call>")
        elif at < len(text):
            return None
        calls.append(call)
    beside.append(text[at:].strip())
    return Parsed("\n".join(part for part in beside if part), tuple(calls)) if calls else None


def _llama(text: str, names: Collection[str]) -> Parsed | None:
    """The whole text is one JSON object or several, `{"name": …, "parameters": {…}}`. No mark says so: where tools were told, the
    name must be one of theirs."""
    text = text.strip().removeprefix("<|python_tag|>")
    calls, at = [], 0
    while at < len(text):
        found = _object(text, at)
        call = None if found is None else (_call(found[0], "parameters") or _call(found[0], "arguments"))
        if found is None or call is None or (names and call.name not in names):
            return None
        calls.append(call)
        at = _end_of(_BETWEEN, text, found[1])
    return Parsed("", tuple(calls)) if calls else None


def _mistral(text: str, names: Collection[str]) -> Parsed | None:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or later models' `[TOOL_CALLS]name[ARGS]{…}` once a call."""
    calls, begin = list[Call | None](), text.find("[TOOL_CALLS]")
    if begin < 0:
        return None
    at = begin
    while text.startswith("[TOOL_CALLS]", at):
        at += len("[TOOL_CALLS]")
        named = _MISTRAL_NAME.match(text, at)
        found = _value(text, at if named is None else named.end())
        if found is None:
            return None
        if named is not None:
            calls.append(_named(named[1], found[0]))
        elif isinstance(found[0], list) and found[0]:
            calls += [_call(one, "arguments") for one in found[0]]
        else:
            return None
        at = _end_of(_SPACE, text, found[1])
    good = [call for call in calls if call is not None]
    return Parsed(text[:begin].rstrip(), tuple(good)) if at == len(text) and len(good) == len(calls) else None


_HERMES = Form("hermes", ("<tool_call>",), _hermes)
_FORMS = {
    "qwen": _HERMES,
    "chatml": _HERMES,
    "llama": Form("llama", ("{", "<|python_tag|>"), _llama, opening_only=True),
    "mistral": Form("mistral", ("[TOOL_CALLS]",), _mistral, kept=("[TOOL_CALLS]",)),
}


def _call(tree: Any, key: str) -> Call | None:
    """Of {"name": …, key: {…}}; fields beside them (an id) are left out."""
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return None
    return _named(tree["name"], tree.get(key))


def _named(name: str, arguments: Any) -> Call | None:
    if not isinstance(arguments, dict) or not name or len(name) > _MOST_NAME or not _is_text(name):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # 1e999; as deep as can be read and no deeper
        return None
    return Call(name, text if _is_text(text) else json.dumps(arguments))


def _is_text(text: str) -> bool:
    """Half of a surrogate pair, which JSON can spell, isn't."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _object(text: str, start: int) -> tuple[dict[str, Any], int] | None:
    found = _value(text, start)
    return found if found is not None and isinstance(found[0], dict) else None


def _value(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins there, behind white space, and where it ends."""
    try:
        return _decoder.raw_decode(text, _end_of(_SPACE, text, start))
    except (ValueError, RecursionError):
        return None


def _end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return start if found is None else found.end()


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} isn't JSON")
