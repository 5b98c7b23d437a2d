"""The picture of a layout flow: rows, folding, letters and colours."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from prepare.report.charts.flow_picture import LIMIT, flow_svg, write_flow_svg
from prepare.report.charts.module_rows import SMALL, rows

from made_runs import blocks, copied, event, flow_of, hostile_flow, module
from page_reader import READABLE, READABLE_PICTURE, TEMPLATES, contrast
from prepare.flow.records import Flow
from prepare.report.charts.cut import cut, width_of

SVG = "{http://www.w3.org/2000/svg}"


def marked(svg: str, kind: str) -> list[ET.Element]:
    root = ET.fromstring(svg)
    return [g for g in root.iter(f"{SVG}g") if f"fp-in-{kind}" in g.get("class", "").split()]


def texts(element: ET.Element) -> str:
    return " ".join("".join(text.itertext()) for text in element.iter(f"{SVG}text"))


def test_the_picture_shows_where_the_layout_is_lost():
    flow = blocks(3)
    svg = flow_svg(flow)
    lost = marked(svg, "break")
    assert len(lost) == flow.summary["breaks"] == 3
    assert all("InstanceNorm3d, once" in texts(g) and "4.0 KiB" in texts(g) for g in lost)  # fmt: skip
    assert len(marked(svg, "regain")) == flow.summary["regains"] == 3
    phrase = texts(ET.fromstring(svg))
    assert "3 breaks, all InstanceNorm3d" in phrase
    assert "Lost first in body.0.norm: InstanceNorm3d." in phrase
    assert "lost 3 times, regained 3 times; 3 of 3 convolutions returned it" in phrase


def test_a_flow_without_a_break_says_so():
    svg = flow_svg(blocks(3, broken=0))
    assert marked(svg, "break") == []
    assert "channels_last_3d is never lost; 3 of 3 convolutions returned it." in texts(ET.fromstring(svg))  # fmt: skip
    assert "Lost first" not in svg


def test_counts_and_phases_are_shown():
    flow = blocks(1)
    events = (event("body.0.norm", count=12), event("body.0.conv", phase="backward"))
    titles = [t.text for t in ET.fromstring(flow_svg(replace(flow, events=events))).iter(f"{SVG}title")]  # fmt: skip
    assert any("; InstanceNorm3d, 12 times; 4.0 KiB copied" in phrase for phrase in titles)
    assert any(title.endswith("InstanceNorm3d, once in backward") for title in titles)


@pytest.mark.parametrize("layout", ["channels_last", "channels_last_3d", "contiguous", "ambiguous", "other"])  # fmt: skip
def test_each_layout_has_a_letter_besides_its_colour(layout):
    svg = flow_svg(flow_of([module("", layout)]))
    letter = {"channels_last": "L", "channels_last_3d": "L", "contiguous": "C", "ambiguous": "A", "other": "O"}[layout]  # fmt: skip
    letters = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text") if "fp-letter" in t.get("class", "")]  # fmt: skip
    assert letters == [letter, letter]  # in the legend and in the row


def test_the_picture_is_valid_with_hostile_names(tmp_path):
    write_flow_svg(hostile_flow(), tmp_path / "flow.svg")
    text = (tmp_path / "flow.svg").read_bytes().decode("utf-8")
    root = ET.fromstring(text)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        *("svg", "title", "desc", "style", "rect", "text", "tspan", "path", "g"),
    }
    assert re.findall("https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
    assert "n" * 400 not in text
    assert "&lt;script&gt;" in text


def test_a_small_tree_is_shown_as_it_is():
    flow = blocks(9, broken=0)
    assert len(flow.modules) <= SMALL
    assert [row.module for row in rows(flow, limit=LIMIT)] == list(flow.modules)


def test_modules_without_events_are_folded_into_one_row():
    shown = rows(blocks(100, broken=1), limit=LIMIT)
    assert len(shown) < 10
    assert shown[-1].label == "1 to 99"
    assert shown[-1].totals.modules == 99 * 4
    assert "396 modules, all channels_last_3d" in flow_svg(blocks(100, broken=1))


def test_if_all_modules_lose_the_layout_the_first_are_shown():
    shown = rows(blocks(5000), limit=LIMIT)
    seen = [row.module.name for row in shown if row.events and not row.folded]
    assert seen[:4] == ["body.0.conv", "body.0.norm", "body.1.conv", "body.1.norm"]
    assert shown[-1].folded
    assert "to 4999" in shown[-1].label


def deep(levels: int) -> Flow:
    names = ["", *(".".join("d" * level) for level in range(1, levels + 1))]
    return flow_of([module(name) for name in names], [event(names[-1])], [copied(names[-1])])


TREES = {
    "blocks": blocks(50),
    "many blocks": blocks(5000),
    "few of many": blocks(5000, broken=7),
    "deep": deep(700),
    "wide": flow_of([module(""), *(module(str(n)) for n in range(20_000))], [event(str(n)) for n in range(20_000)], [copied("3")]),
    "not in the tree": flow_of([module(""), module("a")], [event("elsewhere.x")], [copied("elsewhere.x")]),
    "alone": flow_of([module("")], [event("")], [copied("")]),
}  # fmt: skip


@pytest.mark.parametrize("limit", [LIMIT, 30])
@pytest.mark.parametrize("name", TREES)
def test_no_tree_has_too_many_rows_and_nothing_is_lost_in_folding(name, limit):
    flow = TREES[name]
    shown = rows(flow, limit=limit)
    assert len(shown) <= max(limit, min(SMALL, len(flow.modules)))
    found = flow.summary
    assert sum(row.totals.events["break"] for row in shown) == found["breaks"]
    assert sum(row.totals.events["regain"] for row in shown) == found["regains"]
    assert sum(row.totals.copied for row in shown) == found["copied_bytes"]
    index = {module.name: number for number, module in enumerate(flow.modules)}
    order = [index[row.module.name] for row in shown]
    assert order == sorted(order)
    ET.fromstring(flow_svg(flow, limit=limit))


def test_an_empty_flow_has_a_picture():
    ET.fromstring(flow_svg(replace(flow_of([]), wanted={}, status="cannot predict", reason="no")))


@pytest.mark.parametrize("text", ["short", "n" * 100, "\u5c42" * 40, "a" + "\u5c42" * 40])
def test_a_cut_text_is_no_wider_than_its_room(text):
    assert width_of(cut(text, 20)) <= 20
    assert cut(text, 20)[0] == text[0]
    assert cut(text, 20)[-1] == text[-1]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("sheet", "pairs"), [("report.css", READABLE), ("flow_picture.css", READABLE_PICTURE)])  # fmt: skip
def test_every_text_can_be_read_in_light_and_dark(sheet, pairs, dark):
    light, _, rest = (TEMPLATES / sheet).read_text().partition("@media (prefers-color-scheme: dark)")  # fmt: skip
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if dark:
        changed = dict(re.findall(r"--([\w-]+): (#\w{6})", rest))
        assert changed.keys() == colours.keys()
        colours |= changed
    for text, ground in pairs:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
