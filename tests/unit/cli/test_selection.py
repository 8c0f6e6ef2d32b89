"""The options that choose trajectories, as filters; what is no range is refused in one line."""

from __future__ import annotations

import math

import pytest

from towline.cli.source import is_bundle
from towline.cli.trajectories import make_filter
from towline.errors import UsageError

NONE = dict.fromkeys(
    ("group", "versions", "reward", "finish", "replica", "lane", "prompt", "time", "environment", "state")
)  # fmt: skip
NOON = 1_777_636_800.0  # 2026-05-01T12:00:00Z


def made(**options):
    return make_filter(**{**NONE, **options})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0.5:1", (0.5, 1.0)),
        ("-1..2.5", (-1.0, 2.5)),
        ("..2.5", (-math.inf, 2.5)),
        (":2", (-math.inf, 2.0)),
        ("0.25:", (0.25, math.inf)),
        ("1", (1.0, 1.0)),
        ("-1e-3:1e-3", (-1e-3, 1e-3)),
    ],
)
def test_a_range_of_numbers(text, wanted):
    assert made(reward=text).reward == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{NOON}:{NOON + 5}", (NOON, NOON + 5)),
        ("2026-05-01T12:00..2026-05-01T12:00:05", (NOON, NOON + 5)),
        ("2026-05-01T14:00+02:00..", (NOON, math.inf)),
        ("..2026-05-01T12:00Z", (-math.inf, NOON)),
        ("2026-05-01T12:00:00", (NOON, NOON)),
    ],
)
def test_a_range_of_times(text, wanted):
    assert made(time=text).time == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"reward": "high"}, {"reward": "2:1"}, {"time": "yesterday.."}, {"versions": "a:b"}, {"group": "ext-"}, {"group": "1.2"},
        {"state": "lost"}, {"reward": "nan"}, {"finish": "stopp"},
    ],
)  # fmt: skip
def test_what_is_none_is_refused(options):
    with pytest.raises(UsageError) as refused:
        made(**options)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("3:5", (3, 5)),
        ("3:", (3, 2**53)),
        (":5", (0, 5)),
        ("inf", (2**53, 2**53)),
        ("1e999:", (2**53, 2**53)),
        (":-inf", (0, -1)),
    ],
)
def test_a_range_of_versions_may_be_open_at_either_end(text, wanted):
    assert made(versions=text).versions == wanted


def test_an_absolute_folder_is_meant_as_a_bundle_and_says_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    assert is_bundle(str(tmp_path / "mine"))
    assert not is_bundle("mine")
    assert not is_bundle("none")


def test_a_group_from_outside_is_named_as_it_is_shown():
    assert (made(group="12").group, made(group="ext-12").group) == (12, -12)
    assert not made(group="12").needs_contents
    assert made(state="dropped").needs_contents
    assert made(environment="single-turn").needs_decisions
