"""Test that a flow restores all state, and what happens if the forward fails."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flow_checks import BOTH, Net, cl
from flow_nets import converted
from prepare.errors import ModelError, RefusedError
from prepare.stages.flow import observe, predict
from prepare.stages.flow.document import flow_sentence
from small_nets import bits, facts


class Busy(nn.Module):
    """Changes everything that a forward can change about its module and the global state."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.5)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.register_buffer("seen", torch.zeros(4))
        self.plain, self.calls, self.log = torch.zeros(4), 0, []
        self.fails = False

    def forward(self, x):
        x.mul_(2)
        self.calls += 1
        self.log.append(self.calls)
        self.seen = self.seen + 1
        self.plain.add_(1)
        self.eval()
        self.norm.train()
        x = F.dropout(self.norm(self.conv(x)), training=True)
        if self.fails:
            raise RuntimeError("halfway")
        return self.rnn(x.flatten(2).transpose(1, 2))[0] + torch.rand(1)


@BOTH
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_example_and_random_state_are_restored(flow_of, fails):
    net, x = converted(Busy()).train(), cl(2, 4, 8, 8)
    net.fails = fails
    for hook in (net.conv.register_forward_hook, net.norm.register_forward_pre_hook):
        hook(lambda *_: None)
    net.conv.weight.register_hook(lambda grad: 1 / 0)
    net.conv.bias.grad = torch.ones(4)
    before, state, x_bits = facts(net), torch.get_rng_state(), bits(x)
    grads = {name: id(p.grad) for name, p in net.named_parameters()}
    world = set(vars(nn.modules.module)["_global_forward_hooks"])
    try:
        flow_of(net, x)
    except ModelError as error:
        assert fails
        assert "halfway" in str(error)
    assert facts(net) == before
    assert {name: id(p.grad) for name, p in net.named_parameters()} == grads
    assert net.conv.bias.grad.eq(1).all()
    assert torch.equal(torch.get_rng_state(), state)
    assert (bits(x), net.calls, net.log, net.plain.any().item()) == (x_bits, 0, [], False)
    assert all(module.training for module in net.modules())
    assert set(vars(nn.modules.module)["_global_forward_hooks"]) == world
    assert torch.is_grad_enabled()
    assert [id(w) for w in net.rnn._flat_weights] == [id(p) for p in net.rnn.parameters()]


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
