"""The bars of a timing: lengths, intervals and colours."""

import re
from dataclasses import replace

import pytest

from page_reader import HOSTILE, TEMPLATES, contrast
from prepare.app.report.html import drawn, laid_out
from prepare.core.document import MARKS, Bar, Bars


def bars(*values, **more):
    return Bars(title="Time", rows=tuple(Bar(label=f"bar {v}", value=v, text=f"{v} ms", **more) for v in values))  # fmt: skip


def test_bars_are_proportional_to_their_values():
    chart = bars(10.0, 5.0, 0.0)
    assert [row["wide"] for row in laid_out(chart)[1]] == [100.0, 50.0, 0.0]
    assert laid_out(bars(None, 1.0))[1][0]["wide"] is None
    widest = replace(chart.rows[0], interval=(7.5, 12.5), mark="baseline")
    base, rows = laid_out(replace(chart, rows=(widest, *chart.rows[1:])))
    assert (base, rows[0]["wide"], rows[0]["whisker"]) == (80.0, 80.0, (60.0, 40.0))


def test_a_value_out_of_all_proportion_leaves_the_chart():
    rows = (
        Bar(label="unprepared", value=1.0, mark="baseline"),
        Bar(label="a", value=0.8, interval=(0.7, 0.9)),
        Bar(label="b", value=2.0, interval=(0.002, 2620.0)),
    )
    _, shown = laid_out(Bars(title="", rows=rows))
    assert [row["beyond"] for row in shown] == [False, False, True]
    assert shown[1]["wide"] > 25


@pytest.mark.parametrize(
    "chart",
    [
        Bars(title="none", rows=()),
        bars(None),
        bars(0.0),
        bars(1e-12, 1e12, interval=(0.0, 1e12)),
        bars(*range(100), mark="no such mark"),
        replace(bars(1.0), rows=tuple(Bar(label=name, value=1.0, text=name, mark=name) for name in HOSTILE)),
    ],
)  # fmt: skip
def test_any_chart_can_be_drawn_within_its_frame(chart):
    body = drawn([chart], "x")
    assert "<script>" not in body
    assert set(re.findall(r'<p class="bar (\w*)"', body)) <= {*MARKS}
    for row in laid_out(chart)[1]:
        assert 0 <= (row["wide"] or 0) <= 100
        assert sum(row["whisker"] or (0,)) <= 100.1


@pytest.mark.parametrize("paper", ["#ffffff", "#14181f"])
def test_colours_of_bars_have_enough_contrast_in_light_and_dark(paper):
    text = (TEMPLATES / "report.css").read_text()
    colours = re.findall(r"\.track \.\w+ \{ background: (#\w{6})", text)
    assert len(colours) >= 3
    assert all(contrast(colour, paper) >= 3 for colour in colours)
