"""A flow that is saved and loaded, and what is shown of it: sentences and tables."""

import json

from torch import nn

from flow_checks import Net, cl
from prepare.stages.flow import Flow, observe


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
