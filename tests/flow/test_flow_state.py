"""Test that a flow restores all state, and what happens if the forward fails."""

import pytest
import torch
from torch import nn

from flow_checks import Net, cl
from flow_nets import converted
from prepare.errors import ModelError, RefusedError
from prepare.stages.flow import observe, predict
from prepare.stages.flow.document import flow_sentence


class Chooses(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.conv, self.choose = nn.Conv2d(4, 4, 3), choose

    def forward(self, x):
        return self.choose(self.conv(x))


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda x: x if x.sum() > 0 else -x, "needs the value of a tensor"),
        (lambda x: x * x.mean().item(), "needs the value of a tensor"),
        (lambda x: x[x > 0], "gives a tensor whose shape depends on the data"),
        (lambda x: torch.from_numpy(x.detach().numpy()), "observe a real forward instead"),
    ],
)
def test_data_dependent_code_is_observed_but_not_predicted(choose, message):
    net = converted(Chooses(choose))
    flow = predict(net, cl(2, 4, 8, 8))
    assert flow.status == "cannot predict"
    assert message in flow.reason
    assert "Traceback" not in flow.reason
    assert [c.module for c in flow.convolutions] == ["conv"]
    assert observe(net, cl(2, 4, 8, 8)).status == "ok"
    assert flow_sentence(flow).startswith("unclear: forward of Chooses")


def test_a_forward_that_raises_names_the_module():
    net = Net(lambda net, x: net.first(x[:, :2]))
    with pytest.raises(ModelError, match="forward of first"):
        observe(net, cl(2, 4, 8, 8))
    assert "forward of first" in predict(net, cl(2, 4, 8, 8)).reason


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_module_must_run_once_first():
    net = nn.Sequential(nn.LazyConv2d(4, 3))
    assert predict(net, cl(2, 4, 8, 8)).reason == "0.weight has no shape yet; run one forward first"
    with pytest.raises(RefusedError, match="run one forward first"):
        observe(net, cl(2, 4, 8, 8))
