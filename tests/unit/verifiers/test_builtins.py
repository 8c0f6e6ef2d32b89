from __future__ import annotations

from decimal import Decimal

import pytest

from towline.errors import UsageError, VerifierError
from towline.verifiers.combined import WeightedSum
from towline.verifiers.length import LengthPenalty, ShorterIsBetter, finished
from towline.verifiers.text import RegexMatch, exact_match, final_number, numeric_answer, parse_number


def test_exact_match_ignores_outer_space_only(make_sample):
    assert exact_match(make_sample(" 12589\n", answer="12589")) == 1.0
    assert exact_match(make_sample("1 2589", answer="12589")) == 0.0
    assert exact_match(make_sample("12589", answer="12598")) == 0.0
    assert exact_match(make_sample(" 12589", answer="12589"), normalise="none") == 0.0


def test_exact_match_by_words_and_with_several_answers(make_sample):
    assert exact_match(make_sample("New  York.", answer=["NYC", "new york"]), normalise="words") == 1.0
    assert exact_match(make_sample("Boston", answer=["NYC", "new york"]), normalise="words") == 0.0


def test_a_response_that_was_cut_off_is_no_exact_match(make_sample):
    cut = make_sample("12589", finish="length", answer="12589")
    assert exact_match(cut) == 0.0
    assert exact_match(cut, finished=False) == 1.0


def test_a_reference_without_the_answer_is_an_error_and_not_a_zero(make_sample):
    with pytest.raises(VerifierError, match="no 'answer'"):
        exact_match(make_sample("1", solution="1"))
    with pytest.raises(VerifierError, match="not a number"):
        numeric_answer(make_sample("1", answer="one"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", "1000"), ("-2.5e3", "-2500"), ("3/4", "0.75"), ("12%", "0.12"), (".5", "0.5"), ("+7", "7"), ("−3", "-3"),
        ("1,00", None), ("1/0", None), ("", None), ("-", None), ("%", None), ("1e999999999", None), ("abc", None),
    ],
)  # fmt: skip
def test_a_number_is_read_as_people_write_it(text, value):
    assert parse_number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("first 3, then 4.", "4"), ("so \\boxed{12} or 13", "12"), ("\\boxed{1} \\boxed{ 2/4 }", "0.5"), ("5-2", "2"),
        ("it is -2", "-2"), ("\\boxed{\\text{no}} 7", None), ("\\boxed{7", "7"), ("nothing", None),
    ],
)  # fmt: skip
def test_the_final_number_is_the_boxed_one_or_the_last(text, value):
    assert final_number(text) == (None if value is None else Decimal(value))


def test_numeric_answer_keeps_to_its_tolerances(make_sample):
    assert numeric_answer(make_sample("= 0.1 + 0.2 = 0.3", answer=0.3)) == 1.0
    assert numeric_answer(make_sample("100.9", answer="100"), relative_tolerance=0.01) == 1.0
    assert numeric_answer(make_sample("101.1", answer="100"), relative_tolerance=0.01) == 0.0
    assert numeric_answer(make_sample("100.5", answer="100"), absolute_tolerance=0.5) == 1.0
    assert numeric_answer(make_sample("no idea", answer="100"), absolute_tolerance=1e9) == 0.0


def test_regex_matches_the_whole_response_unless_told_otherwise(make_sample):
    sample = make_sample("<think>a\nb</think>12")
    assert RegexMatch("<think>.*</think>.*")(sample) == 1.0
    assert RegexMatch("<think>.*</think>")(sample) == 0.0
    assert RegexMatch("<think>.*</think>", search=True)(sample) == 1.0
    assert RegexMatch("<think>.*</think>.*", dot_all=False)(sample) == 0.0
    with pytest.raises(UsageError, match="pattern"):
        RegexMatch("(")


def test_only_a_response_that_ended_itself_is_finished(make_sample):
    assert [finished(make_sample("x", finish=reason)) for reason in ("stop", "length", "deadline")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("length", "reward"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (14, -1.0)])
def test_length_penalty_follows_the_dapo_formula(make_sample, length, reward):
    assert LengthPenalty(max_tokens=10, cache_tokens=4)(make_sample("x" * length)) == reward


def test_length_penalty_counts_the_policys_tokens_alone(make_sample):
    assert LengthPenalty(max_tokens=4, cache_tokens=2)(make_sample("x" * 8, mask=[1, 1, 0, 0, 0, 0, 0, 0])) == 0.0


def test_shorter_right_answers_gain_and_long_wrong_ones_lose(make_sample):
    group = [
        make_sample("ok", answer="ok"),
        make_sample("  ok  ", answer="ok"),
        make_sample("no", answer="ok"),
        make_sample("n o n o", answer="ok"),
    ]  # lengths 2, 6, 2, 7: lambda = 0.5, -0.3, 0.5, -0.5
    rewards = ShorterIsBetter("towline.verifiers.text:exact_match", weight=0.1)(group)
    assert [reward.value for reward in rewards] == pytest.approx([1.05, 0.97, 0.0, -0.05])
    assert rewards[1].components == pytest.approx({"task": 1.0, "length": -0.3})


def test_shorter_is_better_says_nothing_where_all_are_equally_long(make_sample):
    rewards = ShorterIsBetter("towline.verifiers.length:finished")([make_sample("ab"), make_sample("cd", finish="length")])
    assert [reward.value for reward in rewards] == [1.0, 0.0]


def test_a_weighted_sum_shows_its_parts(make_sample):
    verifier = WeightedSum(
        [
            {"function": "towline.verifiers.text:exact_match"},
            {
                "function": "towline.verifiers.length:LengthPenalty",
                "weight": 0.5,
                "name": "length",
                "arguments": {"max_tokens": 4, "cache_tokens": 2},
            },
        ]
    )
    reward = verifier(make_sample("abc", answer="abc"))
    assert reward.value == pytest.approx(1.0 - 0.25)
    assert reward.components == {"exact_match": 1.0, "length": -0.5}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "is empty"),
        ([{"weight": 1}], "function is missing"),
        ([{"function": "towline.verifiers.length:finished", "wieght": 2}], "'wieght'"),
        ([{"function": "towline.verifiers.length:finished"}] * 2, "name of its own"),
        ([{"function": "towline.verifiers.length:nothing"}], r"parts\[0\].function"),
    ],
)
def test_a_faulty_sum_is_refused_at_once(parts, message):
    with pytest.raises(UsageError, match=message):
        WeightedSum(parts)
