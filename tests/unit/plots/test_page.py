"""Pages and charts: whole without a network, nothing of a run's text can become markup, empty data draws too."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from towline.plots import charts
from towline.plots.charts import Series
from towline.plots.page import Page

EVIL = "<script>alert(1)</script>&\"'"


def drawn() -> dict[str, str]:
    return {
        "lines": charts.lines([Series(EVIL, [0, 1], [1, 2]), Series("b", [0, 1], [2, 1], "step")], x_label=EVIL, y_label="y"),
        "bars": charts.bars({EVIL: 3.0, "b": 1.0}, x_label="n"),
        "stacked": charts.stacked([0, 1, 2], {EVIL: [1, 1, 1], "b": [0, 1, 2]}, x_label="x", y_label="y"),
        "histogram": charts.histogram({"a": {0: 3, 2: 1}, "b": {1: 2}}, x_label="x", y_label="y", bound=(EVIL, 2)),
        "cdf": charts.cdf({EVIL: [0.1, 3.0, 1.0]}, x_label="s", log_x=True),
    }


@pytest.mark.parametrize("name", ["lines", "bars", "stacked", "histogram", "cdf"])
def test_a_chart_is_well_formed_and_follows_the_pages_colours(name):
    svg = drawn()[name]
    ElementTree.fromstring(svg)
    assert "<script" not in svg
    assert "currentColor" in svg
    assert charts.INK not in svg
    assert svg == drawn()[name], "the same data gives the same bytes"


def test_charts_without_data_are_drawn_empty():
    for svg in (
        charts.lines([Series("a", [], [])], x_label="x", y_label="y"),
        charts.bars({}, x_label="x"),
        charts.stacked([], {}, x_label="x", y_label="y"),
        charts.histogram({"a": {}}, x_label="x", y_label="y"),
        charts.cdf({"a": []}, x_label="x"),
    ):
        ElementTree.fromstring(svg)


def test_a_cdf_ends_at_the_largest_value_with_a_share_of_one():
    steps: list[Series] = []
    original = charts.lines
    try:
        charts.lines = lambda series, **_: steps.extend(series) or ""
        charts.cdf({"a": [3.0, 1.0, 2.0, 2.0]}, x_label="x")
    finally:
        charts.lines = original
    assert (list(steps[0].x), list(steps[0].y)) == ([1.0, 2.0, 2.0, 3.0], [0.25, 0.5, 0.75, 1.0])


def test_text_is_escaped_wherever_it_stands():
    page = Page(EVIL, EVIL)
    page.heading(EVIL)
    page.text(EVIL, bad=True)
    page.facts([(EVIL, EVIL)])
    page.table([EVIL], [[EVIL], [3], [0.125], [True]])
    page.chart(EVIL, "<svg></svg>", EVIL)
    html = page.html()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 12
    assert '<td class="n">0.125</td>' in html
    assert "<td>True</td>" in html


@pytest.mark.parametrize("name", ["$\\frac{$", "$x^2$", "a_b$"])
def test_a_name_with_dollars_is_a_name_and_no_formula(name):
    for svg in (
        charts.bars({name: 1.0}, x_label=name),
        charts.lines([Series(name, [0, 1], [1, 2]), Series("b", [0, 1], [2, 1])], x_label=name, y_label=name),
    ):
        assert svg.count(f">{name}</text>") >= 2
