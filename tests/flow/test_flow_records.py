"""Test that a flow is saved, loaded and shown."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from torch import nn

from flow_checks import Net, cl
from prepare.core.forward.run_example import LayoutCount
from prepare.errors import FlowError
from prepare.flow import Flow, observe, predict
from prepare.flow.document import flow_sentence
from prepare.flow.records import Copy, Remedy
from prepare.report.terminal.run import _outputs
from shown_records import show


def test_a_flow_round_trips_through_its_file_byte_by_byte(tmp_path):
    net = Net(lambda net, x: net.norm(x), norm=nn.InstanceNorm2d(4))
    flow = observe(net, cl(2, 4, 8, 8), backward=True)
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    flow.save(paths[0])
    Flow.load(paths[0]).save(paths[1])
    observe(net, cl(2, 4, 8, 8), backward=True).save(paths[2])
    assert Flow.load(paths[0]) == flow
    assert len({path.read_bytes() for path in paths}) == 1
    data = json.loads(paths[0].read_text())
    assert (data["format"], data["version"], data["summary"]) == ("prepare.flow", 1, flow.summary)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": "prepare.audit", "version": 1}',
     '{"format": "prepare.flow", "version": 2}',
     '{"format": "prepare.flow", "version": 1, "wanted": {}, "notes": [], "mode": "", "status": "",'
     ' "reason": "", "events": [{"kind": "break"}], "copies": [], "convolutions": [], "modules": []}'],
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
        "import sys; from prepare.flow.records import Flow; "
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
        f'{found}: add "repair_layout": {{}}, "keep_layout": {{}} to remove 1 of 2 breaks'
    )
    assert flow_sentence(predict(Net(lambda net, x: x), cl(2, 4, 8, 8))) == (
        "no breaks, 0 bytes copied per forward"
    )


def test_copies_without_a_break_name_their_operation():
    copy = Copy(module="a", type="GroupNorm", operation="aten.clone", bytes=2048, phase="forward", why="", count=1)  # fmt: skip
    flow = replace(predict(Net(lambda net, x: x), cl(2, 4, 8, 8)), copies=(copy,))
    assert flow_sentence(flow) == (
        "no breaks, 2.0 KiB copied per forward inside clone in GroupNorm"
    )


def test_outputs_beside_an_ineffective_weight_are_explained():
    count = LayoutCount(format="channels_last", gave=6, of=6, ambiguous=0)
    text = "6 of 6 convolutions returned channels_last"
    assert _outputs(count, 0) == text
    assert _outputs(count, 1) == f"{text}; their inputs decide that, also for the 1 ineffective"


def test_the_table_names_call_sites_lines_and_the_file(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    net = Net(lambda net, x: net.norm(x) + x, norm=nn.InstanceNorm2d(4))
    show("flow", observe(net, cl(2, 4, 8, 8)))
    text = capsys.readouterr().out
    for part in ("2 breaks (1 InstanceNorm2d, 1 add in Net)", "wanted: channels_last for 4-d tensors",
                 "2 of 2 convolutions returned it (Mkldnn 2)", "self decides"):  # fmt: skip
        assert part in text
