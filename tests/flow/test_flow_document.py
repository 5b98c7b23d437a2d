"""What a page shows of a layout flow: the strip of all modules, and the tree with what loses the layout."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from made_runs import blocks, copied, event, flow_of, hostile_flow, module
from page_reader import READABLE, READABLE_PICTURE, TEMPLATES, contrast
from prepare.core.document import Shown, Strip, Tree
from prepare.flow.document import flow_document
from prepare.flow.records import Flow
from prepare.report.charts import cut, width_of
from prepare.report.pages.section import section_body
from prepare.report.render import render


def part(flow: Flow, kind: type):
    document = flow_document(Shown(found={"flow": flow}))
    return next(part for part in document.parts() if isinstance(part, kind))


def every(nodes):
    for node in nodes:
        yield node
        yield from every(node.children)


def svg(flow: Flow) -> str:
    return render("strip.svg", strip=part(flow, Strip), picture="flow", alone=True)


def test_the_tree_shows_where_the_layout_is_lost():
    nodes = list(every(part(blocks(3), Tree).nodes))
    lost = [node for node in nodes if node.mark == "break"]
    assert [node.name for node in lost] == [f"body.{n}.norm" for n in range(3)]
    assert {(node.remark, node.figure) for node in lost} == {
        ("InstanceNorm3d, once", "4.0 KiB copied")
    }
    assert len([node for node in nodes if node.mark == "regain"]) == 3
    assert len(nodes) == len(blocks(3).modules)


def test_what_holds_a_break_is_open_and_the_rest_is_folded():
    opened = {node.name for node in every(part(blocks(100, broken=1), Tree).nodes) if node.is_open}
    assert opened == {"the model itself", "body", "body.0"}


def test_counts_and_phases_are_shown():
    events = (event("body.0.norm", count=12), event("body.0.norm", phase="backward"))
    nodes = every(part(replace(blocks(1), events=events), Tree).nodes)
    assert "InstanceNorm3d, 12 times; InstanceNorm3d, once in backward" in {n.remark for n in nodes}


@pytest.mark.parametrize(
    ("layout", "letter"),
    [("channels_last", "L"), ("channels_last_3d", "L"), ("contiguous", "C"), ("ambiguous", "A"), ("other", "O"), ("new", "?")],
)  # fmt: skip
def test_each_layout_has_a_letter_besides_its_colour(layout, letter):
    flow = flow_of([module("", layout)])
    assert part(flow, Tree).nodes[0].letter == letter
    assert [entry[1] for entry in part(flow, Strip).legend] == [letter]


@pytest.mark.parametrize("flow", [hostile_flow(), flow_of([]), blocks(5000), flow_of([module(".".join("d" * n)) for n in range(1, 700)])],
                         ids=["hostile names", "empty", "many blocks", "deep"])  # fmt: skip
def test_every_flow_is_drawn(flow):
    flow = replace(flow, wanted={}) if not flow.modules else flow
    root = ET.fromstring(svg(flow))
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg",
        "title",
        "style",
        "rect",
        "path",
    }
    assert re.findall("https?://[^\"' ]+", svg(flow)) == ["http://www.w3.org/2000/svg"]
    body = section_body(flow_document(Shown(found={"flow": flow})))
    assert "<script>alert" not in body
    assert body.count("<details") == body.count("</details>")


def test_an_event_of_an_unknown_module_stands_at_the_root():
    flow = flow_of([module(""), module("a")], [event("elsewhere.x")], [copied("elsewhere.x")])
    root = part(flow, Tree).nodes[0]
    assert (root.mark, root.figure) == ("break", "4.0 KiB copied")


def test_the_strip_has_a_tick_for_each_break():
    strip = part(blocks(3), Strip)
    assert len(strip.ticks) == 3
    assert ("tick", "", "lost here") in strip.legend
    assert sum(wide for _, _, wide in strip.parts) == pytest.approx(1000, abs=1)


@pytest.mark.parametrize("text", ["short", "n" * 100, "\u5c42" * 40, "a" + "\u5c42" * 40])
def test_a_cut_text_is_no_wider_than_its_room(text):
    assert width_of(cut(text, 20)) <= 20
    assert cut(text, 20)[0] == text[0]
    assert cut(text, 20)[-1] == text[-1]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("sheet", "pairs"), [("report.css", READABLE), ("strip.css", READABLE_PICTURE)])  # fmt: skip
def test_every_text_can_be_read_in_light_and_dark(sheet, pairs, dark):
    light, _, rest = (TEMPLATES / sheet).read_text().partition("@media (prefers-color-scheme: dark)")  # fmt: skip
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if dark:
        changed = dict(re.findall(r"--([\w-]+): (#\w{6})", rest))
        assert changed.keys() == colours.keys()
        colours |= changed
    for text, ground in pairs:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
