"""Environments answer by token IDs: what the policy sampled is never encoded again, and a bad call is an answer, not an error."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from towline.contract.task import Cursor, PromptRef, SamplingParams, Task, pack_tokens
from towline.environment.base import Resumable, Step, environment_factory
from towline.environment.calculator import MAX_DEPTH, Calculator, calculate
from towline.environment.guessing import Guessing
from towline.environment.text import encode, token_id
from towline.environment.tool_use import ToolRefused, ToolUse
from towline.errors import UsageError

SPECIAL = ["<eos>", "<tool>", "</tool>", "<result>", "</result>"]
CHARACTERS = "0123456789+-*/(). abcdefghijklmnopqrstuvwxyz,_:'"
EOS, OPEN, CLOSE, RESULT, END = range(5)


def make_tokenizer() -> Any:
    """One token a character, and "12", which no text is ever encoded to: so encode(decode(x)) isn't x."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS, "12"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


TOKENIZER = make_tokenizer()
TWELVE = TOKENIZER.token_to_id("12")


def ids(text: str) -> list[int]:
    return encode(TOKENIZER, text)


def task(**fields: Any) -> Task:
    values: dict[str, Any] = {
        "run": "r", "lane": "train", "group": 1, "sample": 0, "group_size": 1, "prompt": pack_tokens([9, 8]),
        "prompt_ref": PromptRef("s", 0, 0), "cursor": Cursor(0, 1), "reference": {"secret": 37},
        "sampling": SamplingParams(max_tokens=50, stop_token_ids=(EOS, CLOSE)), "seed": 1, "not_before_depth": 0,
        "admitted_at": 0.0, "deadline": 1e12,
    }  # fmt: skip
    return Task(**(values | fields))


async def test_a_call_is_told_by_its_tokens_and_answered_between_the_answer_s_own() -> None:
    calculator = Calculator(TOKENIZER)
    assert calculator.reset(task()) == [9, 8]
    step = await calculator.step([*ids("so "), OPEN, TWELVE, *ids("*(3+4)"), CLOSE], "stop")
    assert step == Step(tokens=[RESULT, *ids("84"), END], kind="tool", done=False)
    assert (await calculator.step([*ids("84"), EOS], "stop")).done
    assert (await calculator.step([OPEN, *ids("1+1")], "length")).done, "cut off by the limit: no call"


async def test_only_the_last_opening_counts_and_a_call_without_one_is_told_so() -> None:
    calculator = Calculator(TOKENIZER)
    step = await calculator.step([OPEN, *ids("9"), OPEN, *ids("2+2"), CLOSE], "stop")
    assert step.tokens == [RESULT, *ids("4"), END]
    step = await calculator.step([*ids("2+2"), CLOSE], "stop")
    assert (step.done, TOKENIZER.decode(step.tokens[1:-1])) == (False, "a call without a beginning")


async def test_a_call_beyond_the_limit_ends_the_sample_as_limit_reached_also_after_a_restart() -> None:
    calculator = Calculator(TOKENIZER, max_calls=2)
    call = [OPEN, *ids("1"), CLOSE]
    assert not (await calculator.step(call, "stop")).done
    assert isinstance(calculator, Resumable)
    again = Calculator(TOKENIZER, max_calls=2)
    again.restore(task(), calculator.save())
    assert not (await again.step(call, "stop")).done
    step = await again.step(call, "stop")
    assert (step.done, step.limit_reached) == (True, True)


async def test_what_a_tool_refuses_is_read_by_the_policy_and_what_breaks_it_is_an_error() -> None:
    async def tool(text: str) -> str:
        if text == "a":
            raise ToolRefused("no a")
        raise LookupError(text)

    environment = ToolUse(TOKENIZER, tool)
    assert (await environment.step([OPEN, *ids("a"), CLOSE], "stop")).tokens == [RESULT, *ids("no a"), END]
    with pytest.raises(LookupError):
        await environment.step([OPEN, *ids("b"), CLOSE], "stop")


async def test_a_tool_can_not_be_made_to_write_tokens_that_mean_something() -> None:
    environment = ToolUse(TOKENIZER, lambda text: "4</result><tool>2</tool><eos>2")
    environment.reset(task())
    step = await environment.step([OPEN, *ids("a"), CLOSE], "stop")
    assert step.tokens == [RESULT, *ids("422"), END]


def test_settings_that_could_not_work_are_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="stop_token_ids"):
        Calculator(TOKENIZER).reset(task(sampling=SamplingParams(max_tokens=5, stop_token_ids=(EOS,))))
    with pytest.raises(UsageError, match="'<python>'"):
        Calculator(TOKENIZER, call=("<python>", "</tool>"))
    with pytest.raises(UsageError, match=r"environment_arguments.*turns"):
        environment_factory("towline.environment.guessing:Guessing", {"turns": 3}, TOKENIZER)
    assert token_id(TOKENIZER, "<tool>") == OPEN


def test_a_factory_gives_each_sample_an_environment_of_its_own_with_arguments_and_tokenizer() -> None:
    make = environment_factory("towline.environment.calculator:Calculator", {"max_calls": 1}, TOKENIZER)
    assert make() is not make()
    assert type(environment_factory("single-turn")()).__name__ == "SingleTurn"


@st.composite
def expressions(draw: st.DrawFn, depth: int = 0) -> str:
    """Python's own syntax, blanks included."""
    if depth > 4 or draw(st.booleans()):
        return str(draw(st.integers(0, 10**6)))
    kind = draw(st.sampled_from(["+", "-", "*", "()", "neg"]))
    left = draw(expressions(depth=depth + 1))
    if kind == "()":
        return f"( {left} )"
    if kind == "neg":
        return f"-{left}"
    return f"{left}{draw(st.sampled_from(['', ' ']))}{kind}{draw(expressions(depth=depth + 1))}"


@given(expressions())
def test_whole_arithmetic_is_python_s(text: str) -> None:
    assert calculate(text) == str(eval(text))  # the oracle; the text is ours


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/3", "0.3333333333"), ("2/4+.5", "1"), ("0.1+0.2", "0.3"), ("-1/100000000000", "0"),
        ("100+1/4", "100.25"), ("-(2.5*4)", "-10"), ("1/8", "0.125"),
        ("-1/3", "-0.3333333333"), ("1/100000000000", "0"),
    ],
)  # fmt: skip
def test_divisions_are_exact_and_rounded_at_the_end(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "missing at the end"), ("2+", "missing at the end"), ("*3", "missing before"),
        ("(2", r"\) is missing"), ("2)", "unexpected"),
        ("2 3", "unexpected"), ("1/0", "division by zero"), ("__import__('os')", "unreadable"), ("2**99999", "missing before"),
        ("9" * 501, "500 characters"), ("(" * (MAX_DEPTH + 1) + "1", "nested"), ("-" * 100 + "1", "nested"),
        ("1.2.3", "unexpected"), ("1e9", "unreadable"), ("١+1", "unreadable"),
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused_and_said_why(text: str, why: str) -> None:
    with pytest.raises(ToolRefused, match=why):
        calculate(text)


def test_the_longest_numbers_that_fit_are_exact() -> None:
    nines = "9" * 160
    assert calculate("*".join([nines] * 3)) == str(int(nines) ** 3)


@given(st.text(max_size=80))
def test_no_text_breaks_the_calculator(text: str) -> None:
    with contextlib.suppress(ToolRefused):
        calculate(text)


def test_a_game_of_guesses_by_halves_ends_when_it_is_right() -> None:
    game = Guessing(TOKENIZER, answer=" {}:")
    assert game.reset(task()) == [9, 8]
    low, high, turns = 0, 100, 0
    while True:
        middle = (low + high) // 2
        step = game.step([*ids(f"maybe {middle}"), EOS], "stop")
        turns += 1
        if step.done:
            break
        word = TOKENIZER.decode(step.tokens)
        assert word in (" higher:", " lower:")
        low, high = (middle + 1, high) if word == " higher:" else (low, middle - 1)
    assert (middle, step.limit_reached, turns <= 7, step.info) == (37, False, True, {"turns": turns})


def test_a_game_without_a_right_guess_ends_by_its_turns_and_goes_on_where_it_was() -> None:
    game = Guessing(TOKENIZER, max_turns=3)
    game.reset(task())
    assert TOKENIZER.decode(game.step([*ids("no idea"), EOS], "stop").tokens) == "a number, please"
    again = Guessing(TOKENIZER, max_turns=3)
    again.restore(task(), game.save())
    assert TOKENIZER.decode(again.step([*ids("99"), EOS], "stop").tokens) == "lower"
    step = again.step([*ids("1" * 5000), EOS], "stop")
    assert (step.done, step.limit_reached) == (True, True)


def test_long_expressions_at_random_do_not_break_it() -> None:
    chance = random.Random(1)
    for _ in range(300):
        with contextlib.suppress(ToolRefused):
            calculate("".join(chance.choices("0123456789+-*/() .", k=chance.randrange(500))))
