"""A flow that is saved and loaded, and what is shown of it: sentences and tables."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from torch import nn

from flow_checks import Net, cl
from made import blocks, copied, flow_of, hostile_flow, module, show
from page_reader import READABLE, TEMPLATES, contrast
from prepare.app.report.html import drawn
from prepare.core.document import ReportContext
from prepare.errors import FlowError
from prepare.stages.flow import Flow, observe, predict
from prepare.stages.flow.document import flow_document, flow_sentence
from prepare.stages.flow.records import Remedy


def test_a_flow_round_trips_through_its_file_byte_by_byte(tmp_path):
    net = Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4))
    flow = observe(net, cl(2, 4, 8, 8))
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    flow.save(paths[0])
    Flow.load(paths[0]).save(paths[1])
    observe(net, cl(2, 4, 8, 8)).save(paths[2])
    assert Flow.load(paths[0]) == flow
    assert len({path.read_bytes() for path in paths}) == 1
    data = json.loads(paths[0].read_text())
    assert (data["format"], data["version"], data["summary"]) == ("prepare.flow", 1, flow.summary)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "prepare.audit", "version": 1}',
     '{"format": "prepare.flow", "version": 2}',
     '{"format": "prepare.flow", "version": 1, "wanted": {}, "notes": [], "mode": "", "status": "",'
     ' "reason": "", "events": [{"kind": "break"}], "copies": [], "convolutions": []}'],
)  # fmt: skip
def test_a_file_that_is_not_a_flow_is_refused(tmp_path, text):
    path = tmp_path / "flow.json"
    path.write_text(text)
    with pytest.raises(FlowError):
        Flow.load(path)


def test_loading_and_showing_a_flow_needs_no_torch(tmp_path):
    path = tmp_path / "flow.json"
    predict(Net(lambda net, x: x.softmax(1)), cl(2, 4, 8, 8)).save(path)
    code = (
        "import sys; from prepare.stages.flow.records import Flow; "
        f"print(Flow.load({str(path)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_sentence_gives_breaks_cost_and_remedy():
    norms = {"norm": nn.InstanceNorm2d(4), "more": nn.InstanceNorm2d(4)}
    net = Net(lambda net, x: net.more(net.first(net.norm(x))), **norms)
    flow = predict(net, cl(2, 4, 8, 8))
    found = "2 breaks, all InstanceNorm2d, 8.0 KiB copied per forward"
    assert flow_sentence(flow) == found
    remedy = Remedy(steps=("repair_layout", "keep_layout"), breaks=1, copied_bytes=0)
    assert flow_sentence(replace(flow, remedy=remedy)) == (
        f'{found}; add "repair_layout": {{}}, "keep_layout": {{}} (keeps the layout at 1 of 2 places)'
    )
    assert flow_sentence(predict(Net(lambda net, x: x), cl(2, 4, 8, 8))) == (
        "no breaks, 0 bytes copied per forward"
    )


def test_a_contiguous_model_is_told_that_nothing_was_asked_for(tmp_path, capsys):
    text = "nothing was asked for: no convolution is in channels-last"
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3))
    flow = predict(net, cl(2, 3, 8, 8).contiguous())
    assert flow.notes == (text,)
    assert flow_sentence(flow) == f"{text}, 0 bytes copied per forward"
    show("flow", flow)
    assert capsys.readouterr().out.count(text) == 1
    assert (
        drawn(flow_document(ReportContext(found={"flow": flow})).shown("page"), "flow")
        .lower()
        .count(text)
        == 1
    )
    flow.save(tmp_path / "flow.json")
    assert flow_sentence(Flow.load(tmp_path / "flow.json")) == flow_sentence(flow)
    asked = predict(net, cl(2, 3, 8, 8), wanted={4: "channels_last"})
    assert (asked.notes, asked.summary["breaks"]) == ((), 1)


def test_copies_without_a_break_name_their_operation():
    flow = flow_of(copies=[copied("a", 2048, type="GroupNorm", why="")])
    assert flow_sentence(flow) == "no breaks, 2.0 KiB copied per forward inside clone in GroupNorm"


def test_the_table_names_call_sites_lines_and_the_file(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    net = Net(lambda net, x: net.norm(x) + x, norm=nn.InstanceNorm2d(4))
    show("flow", observe(net, cl(2, 4, 8, 8)))
    text = capsys.readouterr().out
    for part in ("2 breaks (1 InstanceNorm2d, 1 add in Net)", "wanted: channels_last for 4-d tensors",
                 "2 of 2 convolutions returned it (Mkldnn 2)", "self decides"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("flow", [hostile_flow(), flow_of([]), blocks(5000), flow_of([module(".".join("d" * n)) for n in range(1, 700)])],
                         ids=["hostile names", "empty", "many blocks", "deep"])  # fmt: skip
def test_every_flow_is_drawn(flow):
    flow = flow if flow.convolutions else replace(flow, wanted={})
    body = drawn(flow_document(ReportContext(found={"flow": flow})).shown("page"), "flow")
    assert "<script>alert" not in body
    assert body.count("<details") == body.count("</details>")


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_can_be_read_in_light_and_dark(dark):
    light, _, rest = (TEMPLATES / "report.css").read_text().partition("@media (prefers-color-scheme: dark)")  # fmt: skip
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if dark:
        changed = dict(re.findall(r"--([\w-]+): (#\w{6})", rest))
        assert changed.keys() == colours.keys()
        colours |= changed
    for text, ground in READABLE:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
