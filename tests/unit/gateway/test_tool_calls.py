"""Tool calls out of an answer's text, per family, over the real tokenizers: what a template would have written is read back, what
is broken stays text, and a stream tells nothing that it must take back."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.real_tokenizers import names, real
from towline.gateway.text import Detokenizer
from towline.gateway.tool_calls import Call, Parsed, Reader, arguments_object, form_of, tool_names, written
from towline.session.messages import likeness

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "größe")]
# What spells a special token would become one, and not come out again.
TEXT = st.text(st.characters(exclude_characters="<[", exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(st.sampled_from(["add", "größe"]), st.dictionaries(TEXT, VALUES, max_size=3)), min_size=1, max_size=3)
PLAIN = st.text(st.characters(exclude_characters="<[{", exclude_categories=["Cs"]), max_size=20)


def write(family: str, before: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """As the family's models do."""
    key = "parameters" if family == "llama" else "arguments"
    trees = [{"name": name, key: arguments} for name, arguments in calls]
    if family == "qwen":
        return before + "\n".join(f"<tool_call>\n{json.dumps(tree, ensure_ascii=False)}\n</tool_call>" for tree in trees)
    if family == "llama":
        return "; ".join(json.dumps(tree) for tree in trees)
    return before + "[TOOL_CALLS]" + json.dumps(trees, ensure_ascii=False)


tokenizer_of = functools.cache(real)


def reader(family: str) -> Reader:
    form = form_of(tokenizer_of(family))
    assert form is not None
    return Reader(form, tool_names(TOOLS))


@pytest.mark.parametrize("family", names())
@settings(max_examples=60, deadline=None)
@given(before=PLAIN, calls=CALLS, data=st.data())
def test_what_was_written_is_read_back_and_a_stream_never_takes_anything_back(
    family: str, before: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    tokenizer, read = tokenizer_of(family), reader(family)
    end = tokenizer.token_to_id({"qwen": "<|im_end|>", "llama": "<|eot_id|>", "mistral": "</s>"}[family])
    assert end is not None
    tokens = [*tokenizer.encode(write(family, before, calls), add_special_tokens=False), end]
    kept = {token: mark for mark in read.form.kept if (token := tokenizer.token_to_id(mark)) is not None}
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True, kept=kept)
    text, told = "", ""
    step = data.draw(st.integers(1, 7))
    for count in [*range(step, len(tokens), step), len(tokens)]:
        text += detokenizer.more(tokens[:count], last=count == len(tokens))
        shown = text[: read.form.plain_until(text)]
        assert shown.startswith(told), "what was told stays told"
        told = shown
    parsed = read.parse(text)
    assert parsed is not None, text
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert parsed.content == ("" if family == "llama" else before.rstrip())
    assert parsed.content.startswith(told)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen", 'so: <tool_call>{"name": "add", "arguments": {"a": 1}'),
        ("qwen", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("qwen", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "add", "arguments": {}} and more</tool_call>'),
        ("qwen", '<tool_call>{"name": "add", "arguments": {}}<tool_call>{"name": "add", "arguments": {}}</tool_call>'),
        ("qwen", "<tool_call>" + '{"name": "add", "arguments": ' + '{"a":' * 100_000),
        ("qwen", "a </tool_call>"),
        ("llama", '{"name": "add", "parameters": {}} is what I would call'),
        ("llama", 'I call {"name": "add", "parameters": {}}'),
        ("llama", '{"name": "unknown", "parameters": {}}'),
        ("llama", "{}"),
        ("llama", ""),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "add"}]'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}] and'),
        ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ],
)
def test_a_broken_call_is_text(family: str, text: str) -> None:
    assert reader(family).parse(text) is None
    assert reader(family).message(text, "seed") == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("family", "text", "parsed"),
    [
        ("qwen", '<tool_call>\n{"name": "add", "arguments": {}}', Parsed("", (Call("add", "{}"),))),
        ("qwen", 'a\n<tool_call>{"name":"add","arguments":{}}</tool_call> b', Parsed("a\nb", (Call("add", "{}"),))),
        (
            "qwen",
            '<tool_call>{"name": "other", "arguments": {"x": "\\ud800"}}</tool_call>',
            Parsed("", (Call("other", '{"x": "\\ud800"}'),)),
        ),
        (
            "qwen",
            '<tool_call>{"name": "add", "arguments": {"a": "<tool_call> </tool_call>"}}</tool_call>',
            Parsed("", (Call("add", '{"a": "<tool_call> </tool_call>"}'),)),
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": "[TOOL_CALLS]"}}]',
            Parsed("", (Call("add", '{"a": "[TOOL_CALLS]"}'),)),
        ),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', Parsed("", (Call("add", '{"a": 1}'),))),
        ("llama", '{"name": "add", "arguments": {"a": 1}}', Parsed("", (Call("add", '{"a": 1}'),))),
        (
            "mistral",
            '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 2}',
            Parsed("", (Call("add", '{"a": 1}'), Call("add", '{"a": 2}'))),
        ),
        ("mistral", 'x [TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "abc"}]', Parsed("x", (Call("add", "{}"),))),
    ],
)
def test_the_spellings_that_families_have(family: str, text: str, parsed: Parsed) -> None:
    assert reader(family).parse(text) == parsed


def test_ids_are_the_same_for_the_same_answer_and_of_nine_letters() -> None:
    parsed = Parsed("", (Call("add", "{}"), Call("add", "{}")))
    ids = [call["id"] for call in written(parsed, "gen-1/0")]
    assert ids == [call["id"] for call in written(parsed, "gen-1/0")]
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)


def test_a_template_gets_arguments_as_objects_and_what_is_none_as_it_came() -> None:
    assert arguments_object('{"a": [1]}') == {"a": [1]}
    for odd in ("", "[1]", "{", '{"a": NaN}', '{"a": ' + "9" * 30 + "}", '{"a": "\\ud800"}', {"a": 1}):
        assert arguments_object(odd) == odd


def test_an_answer_that_comes_back_in_another_of_its_spellings_is_the_same() -> None:
    text = 'ok <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    read = reader("qwen")
    parsed = read.parse(text)
    assert parsed is not None
    raw, calls = {"role": "assistant", "content": text}, written(parsed, "")
    said = read.message(text, "seed") | {"otherwise": [raw, raw | {"tool_calls": calls}]}
    again = json.loads(json.dumps(calls).replace('{\\"a\\": 1}', '{ \\"a\\":1 }'))
    assert likeness(said, raw) == likeness(said, raw | {"tool_calls": calls}) == "same"
    assert likeness(said, {"role": "assistant", "content": "ok", "tool_calls": again}) == "same"
    assert likeness(said, {"role": "assistant", "content": " ok ", "tool_calls": again}) == "whitespace"
    again[0]["function"]["arguments"] = '{"a": 2}'
    assert likeness(said, {"role": "assistant", "content": "ok", "tool_calls": again}) == "other"


@pytest.mark.parametrize("depth", [*range(600, 1000, 10), 5000])
def test_a_call_that_is_nested_ever_so_deeply_breaks_nothing(depth: int) -> None:
    text = '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * depth + "1" + "}" * depth + "}</tool_call>"
    message = reader("qwen").message(text, "seed")
    assert message["content"] == text or message["tool_calls"]
