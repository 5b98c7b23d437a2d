"""The charts of a timing: scales, labels, colours and files."""

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from made import bench_of, comparison
from page_reader import HOSTILE, TEMPLATES, contrast
from prepare.app.report.charts import (
    MARKS,
    WIDTH,
    Axis,
    Bar,
    Bars,
    Plane,
    Point,
    figure,
    laid_out,
    number,
    scale_over,
)
from prepare.stages.bench.document import bench_charts


def bars(*values, **more):
    return Bars(title="Time", rows=tuple(Bar(label=f"bar {v}", value=v, text=f"{v} ms", **more) for v in values))  # fmt: skip


def plane(*points, x=None, y=None):
    found = tuple(Point(label=f"p{at}", x=a, y=b, text="there") for at, (a, b) in enumerate(points))
    return Plane(title="Speed", points=found, x=x or Axis(label="time"), y=y or Axis(label="error", log=True))  # fmt: skip


def parsed(chart):
    return ET.fromstring(str(figure(chart, name="x")).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1))  # fmt: skip


def test_bars_are_proportional_to_their_values():
    chart = bars(10.0, 5.0, 0.0)
    wide = [row["wide"] for row in laid_out(chart)["rows"]]
    assert wide[0] == pytest.approx(WIDTH, abs=1)
    assert wide[1] == pytest.approx(WIDTH / 2, abs=1)
    assert wide[2] == pytest.approx(0, abs=1)
    assert laid_out(bars(None, 1.0))["rows"][0]["wide"] is None
    widest = replace(chart.rows[0], interval=(8.0, 12.5))
    drawn = laid_out(replace(chart, rows=(widest, *chart.rows[1:])))
    assert drawn["rows"][0]["interval"][1] == pytest.approx(WIDTH, abs=1)
    assert drawn["rows"][0]["wide"] == pytest.approx(WIDTH * 0.8, abs=1)


def test_a_chart_describes_itself_to_screen_readers():
    root = parsed(bars(1.0, 2.0))
    title, desc = (root.find(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc"))
    assert (title.text, desc.text) == ("Time", "bar 1.0: 1.0 ms; bar 2.0: 2.0 ms")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [title.get("id"), desc.get("id")]


@pytest.mark.parametrize(
    "chart",
    [
        Bars(title="none", rows=()),
        bars(None),
        bars(0.0),
        bars(1e-12, 1e12, interval=(0.0, 1e12)),
        bars(*range(100), mark="no such mark"),
        plane(),
        plane((1, 0)),
        plane((0, 0), (0, 0)),
        plane((1, 1e-300), (2, 1e300)),
        plane(*((1 + at / 1e6, 1e-3) for at in range(60))),
        plane((1, 1), x=Axis(label="x", log=True, lines=((1.0, "as fast"),)), y=Axis(label="y", lines=((0.5, "allowed"),))),
        replace(bars(1.0), rows=tuple(Bar(label=name, value=1.0, text=name, mark=name) for name in HOSTILE)),
        replace(plane(), points=tuple(Point(label=name, x=1.0, y=1.0, text=name, mark=name) for name in HOSTILE)),
    ],
)  # fmt: skip
def test_any_chart_can_be_drawn_within_its_frame(chart):
    parsed(chart)
    drawn = laid_out(chart)
    for row in drawn.get("rows", ()):
        assert 0 <= (row["wide"] or 0) <= WIDTH
    for point in drawn.get("points", ()):
        assert drawn["box"]["left"] <= point["x"] <= drawn["box"]["right"]
        assert drawn["box"]["top"] <= point["y"] <= drawn["box"]["bottom"]


def test_zero_is_drawn_below_a_logarithmic_scale():
    drawn = laid_out(plane((1.0, 0.0), (0.5, 1e-6), (0.7, 1e-3)))
    zero, small, large = (point["y"] for point in drawn["points"])
    assert drawn["box"]["bottom"] > zero > small > large
    assert drawn["y"]["ticks"][0] == (zero, "0")
    assert "0" not in [word for _, word in laid_out(plane((1.0, 1e-3)))["y"]["ticks"]]


def test_labels_that_would_overlap_are_left_out():
    drawn = laid_out(plane(*((1.0, 10.0**-at) for at in (*[3] * 60, 4, 5))))
    labels = drawn["labels"]
    assert 2 <= len(labels) < 60
    boxes = []
    for x, y, anchor, text in labels:
        long = 6.7 * len(text)
        left = x - {"start": 0, "middle": long / 2, "end": long}[anchor]
        boxes.append((left, y - 11, left + long, y + 3))
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart


@pytest.mark.parametrize("values", [[0.73, 1.0], [1e-7, 1e-3], [3.0, 4.0], [1e6], [], [0.0], [5e-9, 2.0]])  # fmt: skip
@pytest.mark.parametrize("log", [False, True])
def test_a_scale_has_a_few_round_ticks_in_order(values, log):
    scale = scale_over(values, 0, 100, log=log, room_for_zero=10)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert [scale(tick) for tick in ticks] == sorted(scale(tick) for tick in ticks)
    assert len({number(tick) for tick in ticks}) == len(ticks)
    assert all(float(number(tick)) == pytest.approx(tick) for tick in ticks)


@pytest.mark.parametrize("dark", [False, True])
def test_chart_colours_have_enough_contrast_in_light_and_dark(dark):
    light, _, rest = (TEMPLATES / "charts.css").read_text().partition("@media (prefers-color-scheme: dark)")  # fmt: skip
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if dark:
        colours |= dict(re.findall(r"--([\w-]+): (#\w{6})", rest))
    for text in ("ink", "soft"):
        assert contrast(colours[text], colours["paper"]) >= 4.5
    for mark in MARKS:
        assert contrast(colours[mark], colours["paper"]) >= 3


def test_each_case_has_a_chart_of_times():
    charts = bench_charts(bench_of(comparison(), comparison(1.2, verdict="slower")), None)
    assert [chart.title for chart in charts] == ["Time of one inference"] * 2
    assert [bar.mark for chart in charts for bar in chart.rows] == [
        "baseline",
        "better",
        "baseline",
        "worse",
    ]
    assert [bar.label for bar in charts[1].rows] == ["unprepared", "prepared"]
