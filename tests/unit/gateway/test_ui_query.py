"""What a page asks for, out of a URL: whatever it says, it's a filter or one line that says what is wrong."""

from __future__ import annotations

import itertools

import pytest

from towline.errors import UsageError
from towline.gateway.ui_query import sample_filter
from towline.view.samples import SampleFilter

ODD = (
    "",
    "0",
    "-1",
    "3:5",
    "inf",
    "-inf",
    "1e999",
    "inf:inf",
    ":-inf",
    "inf:",
    "nan",
    "9" * 400,
    "1:2:3",
    "\x00",
    "٣",
    "1_0",
    "ext-1",
    "..",
)
KEYS = ("before", "limit", "id", "state", "finish", "step", "version", "reward")


def asked(key: str, text: str) -> SampleFilter | str:
    """The filter, or the refusal's line."""
    try:
        return sample_filter({key: text})
    except UsageError as refused:
        return refused.message


@pytest.mark.parametrize(("key", "text"), list(itertools.product(KEYS, ODD)))
def test_every_question_is_answered_or_refused_in_one_line(key: str, text: str) -> None:
    found = asked(key, text)
    if isinstance(found, str):
        assert "\n" not in found
        return
    for low, high in filter(None, (found.steps, found.versions)):
        assert 0 <= low < 2**31
        assert -1 <= high < 2**31


def test_ranges_are_what_they_say() -> None:
    found = sample_filter({"step": "3:5", "version": ":7"})
    assert (found.steps, found.versions) == ((3, 5), (0, 7))
    assert sample_filter({"step": "3"}).steps == (3, 3)
    assert sample_filter({"step": "inf:"}).steps == (2**31 - 1, 2**31 - 1)
    assert sample_filter({"version": ":-inf"}).versions == (0, -1)
