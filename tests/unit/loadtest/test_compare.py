"""What `towline loadtest compare` calls a change."""

from __future__ import annotations

import numpy as np
import pytest

from towline.loadtest.compare import FIRST, compare, corrected, judge, mann_whitney
from towline.loadtest.result import Result


def result(**metrics: float) -> Result:
    return Result(
        scenario="s", kind="run", started_at=0.0, command="c", commit="abc", machine={"cpu": "x", "cores": 2, "memory_bytes": 1},
        seed=0, settings={"run": {"name": "one"}}, load={"workers": 4}, warm_up_seconds=0.0, metrics=metrics,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 2 / 70),  # the least that four against four can reach
        ([1, 2, 3], [4, 5, 6], 2 / 20),
        ([1, 4, 5, 8], [2, 3, 6, 7], 1.0),  # equal rank sums
        ([1, 3, 5], [2, 4, 6], 0.7),  # U = 3; a table of the exact distribution
        ([7, 7, 7], [7, 7, 7], 1.0),
    ],
)
def test_p_values_are_those_of_the_exact_rank_sum_distribution(a: list[float], b: list[float], p: float) -> None:
    assert mann_whitney(np.array(a, float), np.array(b, float)) == pytest.approx(p)


def test_a_clear_shift_is_a_change_and_its_interval_leaves_one_out() -> None:
    change = judge("rate", np.array([100.0, 101, 99, 102, 100]), np.array([80.0, 81, 79, 80, 82]))
    assert change is not None
    assert change.verdict == "changed"
    assert change.high < 1
    assert change.ratio == pytest.approx(0.8)


def test_the_same_distribution_is_hardly_ever_called_a_change() -> None:
    chance = np.random.default_rng(5)
    verdicts = [judge("rate", *chance.normal(100, 5, (2, 6))) for _ in range(300)]
    told = sum(one is not None and one.verdict == "changed" for one in verdicts)
    assert told / 300 <= 0.06


def test_too_few_repetitions_are_never_a_verdict() -> None:
    change = judge("rate", np.array([100.0]), np.array([50.0]))
    assert change is not None
    assert change.verdict == "unknown"


def test_what_else_differs_between_the_sides_is_told() -> None:
    before, after = result(rate=1.0), result(rate=2.0)
    after.load, after.machine = {"workers": 8}, {"cpu": "y", "cores": 2, "memory_bytes": 1}
    text = "\n".join(compare([before], [after]).lines())
    assert "workers: 4 and 8" in text
    assert "cpu x and y" in text
    assert "too few repetitions" in text


def test_runs_that_are_the_same_have_nothing_to_tell() -> None:
    same = [result(rate=float(value)) for value in (10, 11, 10, 12)]
    assert "nothing changed beyond noise" in compare(same, same).lines()


def test_corrected_p_values_are_those_of_the_paper() -> None:
    """The example of Benjamini and Hochberg (1995), section 3.2: 15 p values, of which the first four are told at 0.05."""
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    assert [one <= 0.05 for one in corrected(p)] == [True] * 4 + [False] * 11
    assert corrected(p[::-1]) == corrected(p)[::-1]
    assert corrected([]) == []


def campaign(chance: np.random.Generator, repetitions: int, names: list[str], **factors: float) -> list[Result]:
    return [result(**{name: float(chance.normal(100, 4)) * factors.get(name, 1.0) for name in names}) for _ in range(repetitions)]


def test_among_many_metrics_of_two_equal_sides_nothing_is_told() -> None:
    """Of 60 metrics, without a correction, one or two would be told in nearly every comparison."""
    chance, names = np.random.default_rng(3), [*sorted(FIRST)[:15], *(f"other.{n}" for n in range(45))]
    quiet = sum(
        "nothing changed beyond noise" in compare(campaign(chance, 6, names), campaign(chance, 6, names)).lines()
        for _ in range(6)
    )
    assert quiet >= 5


def test_one_figure_that_fell_is_named_and_no_other() -> None:
    chance, names = np.random.default_rng(4), [*sorted(FIRST)[:15], "samples_per_second", "other.one"]
    before = campaign(chance, 6, names)
    found = compare(before, campaign(chance, 6, names, samples_per_second=0.7))
    assert [one.metric for one in found.changes if one.verdict == "changed"] == ["samples_per_second"]
    assert any("samples_per_second" in line and "x0." in line for line in found.lines())


def test_a_side_whose_machine_was_busy_is_told_as_such() -> None:
    before, after = [result(rate=1.0)], [result(rate=1.0)]
    before[0].machine, after[0].machine = ({**after[0].machine, "load_average_before": load} for load in (0.5, 9.0))
    assert "busier on one side" in "\n".join(compare(before, after).lines())
