"""Branches, rollbacks, edits and templates that rewrite history: the tree only grows, and what stands in it stays."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest

from support.real_tokenizers import CHATML, names, real, with_template
from towline.contract.task import VersionSpan
from towline.errors import ConflictError, MalformedError, UsageError
from towline.session import messages as session_messages
from towline.session.branch import branch
from towline.session.families import boundary_of
from towline.session.record import decode_session, encode_session
from towline.session.tree import Limits, Session
from unit.session.conversations import Talk


@pytest.fixture(scope="module")
def qwen():
    return boundary_of(real("qwen"))


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def answer(session, place, content, **more):
    tokens = session.boundary.tokenizer.encode(content, add_special_tokens=False)
    tokens.append(session.boundary.tokenizer.token_to_id("<|im_end|>"))
    spans = [VersionSpan(0, len(tokens), 3, "start")]
    session.said(place, tokens, [-0.5] * len(tokens), spans, "stop", assistant(content, **more))
    return place.prompt + tuple(tokens)


def test_a_conversation_of_ordinary_texts_is_what_the_template_writes_at_once(qwen):
    session = Session(qwen)
    talk = [user("What is 2 + 3?")]
    answer(session, session.place(talk), "It is 5.")
    talk += [assistant("It is 5."), user("And 2 * 3?")]
    place = session.place(talk)
    whole = qwen.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    assert list(place.prompt) == qwen.tokenizer.encode(whole, add_special_tokens=False)


def test_a_turn_that_was_cut_off_is_closed(qwen):
    session = Session(qwen)
    place = session.place([user("count")])
    said = qwen.tokenizer.encode("one two thr", add_special_tokens=False)
    session.said(place, said, [-1.0] * len(said), [VersionSpan(0, len(said), 0, "start")], "length", assistant("one two thr"))
    after = session.place([user("count"), assistant("one two thr"), user("on")])
    text = qwen.tokenizer.decode(after.prompt[len(place.prompt) + len(said) :])
    assert text == "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_drops_reasoning_or_prints_another_date_changes_nothing_of_the_prefix(qwen):
    llama = boundary_of(real("llama"), variables={"date": "29 Nov 2026"})
    for boundary, end in ((qwen, "<|im_end|>"), (llama, "<|eot_id|>")):
        session = Session(boundary)
        first = session.place([user("think")])
        said = boundary.tokenizer.encode("<think>hm, hm</think> yes", add_special_tokens=False)
        said.append(boundary.tokenizer.token_to_id(end))
        session.said(
            first,
            said,
            [-1.0] * len(said),
            [VersionSpan(0, len(said), 0, "start")],
            "stop",
            assistant("<think>hm, hm</think> yes"),
        )
        boundary.variables = {"date": "30 Nov 2026"}
        second = session.place([user("think"), assistant(" yes"), user("sure?")])
        assert second.prompt[: len(first.prompt) + len(said)] == first.prompt + tuple(said)
        assert session.mismatches["reasoning"] == 1
        text = boundary.tokenizer.decode(second.prompt)
        assert "hm, hm" in text
        assert "30 Nov" not in text
    boundary.variables = {}


def test_tools_are_told_once_and_others_open_another_branch():
    boundary = boundary_of(real("mistral"))
    session = Session(boundary)
    tools = [{"type": "function", "function": {"name": "add"}}]
    first = session.place([user("add 1 and 2")], tools)
    end = boundary.tokenizer.token_to_id("</s>")
    session.said(first, [end], [-1.0], [VersionSpan(0, 1, 0, "start")], "stop", assistant("", tool_calls=[
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]))  # fmt: skip
    sent = assistant(
        None, tool_calls=[{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}]
    )
    second = session.place([user("add 1 and 2"), sent, {"role": "tool", "content": "3", "tool_call_id": "a"}], tools)
    assert boundary.tokenizer.decode(second.prompt).count("[AVAILABLE_TOOLS]") == 1
    assert boundary.tokenizer.decode(second.prompt).endswith("[TOOL_RESULTS]3[/TOOL_RESULTS]")
    assert session.nodes[second.node].kind == "tool"
    assert not session.mismatches
    other = session.place([user("add 1 and 2")], [])
    assert session.mismatches == {"tools": 1}
    assert session.nodes[other.node].parent == -1
    assert "[AVAILABLE_TOOLS]" not in boundary.tokenizer.decode(other.prompt)


def test_an_edited_answer_is_a_branch_of_its_own_and_the_policys_stays(qwen):
    session = Session(qwen)
    place = session.place([user("a")])
    stood = answer(session, place, "first")
    edited = session.place([user("a"), assistant("something else"), user("b")])
    assert session.mismatches == {"edited": 1}
    assert "something else" in qwen.tokenizer.decode(edited.prompt)
    answer(session, edited, "second")
    made = branch(session)
    assert qwen.tokenizer.decode(made.tokens[made.loss_mask == 1].tolist()) == "second<|im_end|>"
    assert branch(session, 1).tokens.tolist() == list(stood)
    assert len(session.leaves()) == 2


def test_asking_again_and_rolling_back_grow_branches(qwen):
    session = Session(qwen)
    place = session.place([user("a")])
    answer(session, place, "one")
    again = session.place([user("a")])
    assert again == place
    answer(session, again, "two")
    follow = session.place([user("a"), assistant("one"), user("b")])
    assert session.path(follow.node) == [0, 1, 3]
    answer(session, follow, "three")
    assert session.rollback() == 3
    assert branch(session).tokens.tolist() == session.tokens(1), "what was asked last has no answer any more"


def test_nothing_can_be_rolled_back_or_finished_where_nothing_was_said(qwen):
    session = Session(qwen)
    with pytest.raises(ConflictError, match="no turn to roll back"):
        session.rollback()
    session.place([user("a")])
    with pytest.raises(ConflictError, match="no turn to roll back"):
        session.rollback()
    with pytest.raises(ConflictError, match="nothing to finish"):
        branch(session)


def test_a_request_that_ends_with_the_policys_answer_is_refused(qwen):
    session = Session(qwen)
    answer(session, session.place([user("a")]), "b")
    with pytest.raises(UsageError, match="the policy's own answer"):
        session.place([user("a"), assistant("b")])


def test_limits_are_kept_and_what_was_said_stays(qwen):
    session = Session(qwen, Limits(nodes=2, tokens=1000))
    answer(session, session.place([user("a")]), "b")
    with pytest.raises(UsageError, match="the session is full"):
        session.place([user("a"), assistant("b"), user("c")])
    assert branch(session).loss_mask.any()
    small = Session(qwen, Limits(nodes=10, tokens=20))
    with pytest.raises(UsageError, match="20 are allowed"):
        small.place([user("many words " * 20)])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        ([{"role": "robot", "content": "x"}], r"messages\[0\]: a role of"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
    ],
)
def test_bad_messages_are_named(bad, says):
    with pytest.raises(UsageError, match=says):
        session_messages.check(bad)


def test_templates_that_cannot_be_cut_safely_are_refused():
    unknown = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    with pytest.raises(UsageError, match="isn't known to end a turn"):
        boundary_of(with_template("qwen", unknown))
    mangling = CHATML.replace("(m.content or '')", "(m.content or '') | upper")
    with pytest.raises(UsageError, match="doesn't write an answer as it is"):
        boundary_of(with_template("qwen", mangling))
    counting = CHATML.replace("'<|im_end|>\\n'", "'<|im_end|>' + (m.content | length | string) + '\\n'")
    with pytest.raises(UsageError, match="depends on the answer"):
        boundary_of(with_template("qwen", counting))


def test_the_generic_rule_takes_a_template_of_no_known_family_by_the_models_own_end_token():
    template = "{% for m in messages %}{{ '<s>' + m.role + ' ' + m.content + '</s>' }}{% endfor %}{{ '<s>assistant ' }}"
    tokenizer = with_template("llama", template.replace("<s>", "<|python_tag|>").replace("</s>", "<|step_id|>"))
    marks = {tokenizer.token_to_id("<|step_id|>")}
    tokenizer.token_to_id = lambda token, found=tokenizer.token_to_id: None if token == "<|eot_id|>" else found(token)
    boundary = boundary_of(tokenizer, tuple(marks))
    assert (boundary.family, boundary.ends) == ("generic", frozenset(marks))
    with pytest.raises(UsageError, match="isn't known to end a turn"):
        boundary_of(tokenizer, ())


@pytest.mark.parametrize("name", names())
def test_a_session_comes_back_from_its_record(name):
    boundary = boundary_of(real(name))
    talk = Talk(Session(boundary), random.Random(5), boundary.tokenizer.vocab_size)
    for _ in range(3):
        talk.say()
        talk.turn()
    data = encode_session(talk.session)
    again = decode_session(data, boundary)
    assert (again.head, again.tools, again.mismatches) == (talk.session.head, talk.session.tools, talk.session.mismatches)
    assert [node.tokens for node in again.nodes] == [node.tokens for node in talk.session.nodes]
    assert [node.messages for node in again.nodes] == [node.messages for node in talk.session.nodes]


def test_a_record_that_contradicts_itself_is_refused(qwen):
    session = Session(qwen)
    answer(session, session.place([user("a")]), "b")
    with pytest.raises(MalformedError, match="not llama"):
        decode_session(encode_session(session), boundary_of(real("llama")))
    for break_it in (
        lambda s: setattr(s, "head", 7),
        lambda s: s.nodes.__setitem__(1, replace(s.nodes[1], parent=-1)),
        lambda s: s.nodes.__setitem__(1, replace(s.nodes[1], logprobs=())),
        lambda s: s.nodes.__setitem__(0, s.nodes[1]),
    ):
        broken = Session(qwen, nodes=list(session.nodes), head=session.head)
        break_it(broken)
        with pytest.raises(MalformedError):
            decode_session(encode_session(broken), qwen)
    with pytest.raises(MalformedError):
        decode_session(encode_session(session)[:-3], qwen)


@pytest.mark.parametrize("depth", [600, 960])
def test_arguments_that_are_nested_too_deeply_are_refused(qwen, depth):
    session = Session(qwen)
    answer(session, session.place([user("q")]), "a")
    arguments = functools.reduce(lambda inner, _: {"a": inner}, range(depth), {})
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(UsageError, match="nested too deeply"):
        session.place([user("q"), assistant("b", tool_calls=[call]), user("more")])


def test_arguments_that_no_parser_goes_into_are_a_text(qwen):
    session = Session(qwen)
    answer(session, session.place([user("q")]), "a")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":' * 100_000 + "1" + "}" * 100_000}}
    session.place([user("q"), assistant("b", tool_calls=[call]), user("more")])
    assert session.mismatches == {"edited": 1}
