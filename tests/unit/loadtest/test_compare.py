"""What `towline loadtest compare` calls a change."""

from __future__ import annotations

import numpy as np
import pytest

from towline.loadtest.compare import compare, judge, mann_whitney
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
