"""A flow that is saved and loaded, and what is shown of it: sentences and tables."""

import json

import pytest
from torch import nn

from flow_checks import Net, cl
from made import show
from prepare.app.report.html import drawn
from prepare.core.document import ReportContext
from prepare.errors import FlowError
from prepare.stages.flow import Flow, observe, predict
from prepare.stages.flow.document import flow_document, flow_sentence


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
