"""Programs that are not changed: each runs without us and with us, and its networks are prepared.

tests/test_first_week.py runs a GAN, a frozen backbone and averages so; test_frameworks.py has trainers.
"""

import copy
import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.func import functional_call

import prepare
from prepare.frameworks.outside import Outside

RECIPE = {"device": {"device": "cpu"}, "conv2d_memory_format": {}, "repair_layout": {}}
TORCH = nn.Module.__call__, torch.optim.Optimizer.__init__


class Net(nn.Module):
    """A small network whose forward has a named argument."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, 2, 3)

    def forward(self, x, scale=1.0):
        return self.head(self.encoder(x)) * scale


class PerceptualLoss(nn.Conv2d):
    """A loss with weights, which is no network to prepare."""


def batches(count=3):
    torch.manual_seed(1)
    return [torch.randn(2, 3, 12, 12) for _ in range(count)]


def steps(net, optimizer, count=3, call=None):
    losses = []
    for x in batches(count):
        loss = (net if call is None else call)(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def is_last(*nets):
    convolutions = [each for net in nets for each in net.modules() if isinstance(each, nn.Conv2d)]
    return all(each.weight.stride(1) == 1 for each in convolutions)


def mixed_precision_and_accumulation():
    net = Net()
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for index, x in enumerate(batches(4)):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(net(x=x, scale=0.5).square().mean() / 2)
        losses[-1].backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [each.item() for each in losses], [net]


def folds():
    losses, nets = [], []
    for _ in range(3):
        nets.append(Net())
        losses += steps(nets[-1], torch.optim.AdamW(nets[-1].parameters(), fused=True))
    return losses, nets


def resumed():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    state = optimizer.state_dict()
    for index, each in enumerate(net.parameters()):  # of a training that was never prepared
        mean, square = torch.full((2, *each.shape), 0.01)
        state["state"][index] = {"step": torch.tensor(2.0), "exp_avg": mean, "exp_avg_sq": square}
    optimizer.load_state_dict(state)
    losses = steps(net, optimizer)
    moment = optimizer.state[net.head.weight]["exp_avg"]
    assert moment.stride() == net.head.weight.stride()
    return losses, [net]


def assigned_checkpoint():
    net = Net()
    state = copy.deepcopy(net.state_dict())
    losses = steps(net, torch.optim.SGD(net.parameters(), 0.1))
    net.load_state_dict(state, assign=True)
    return losses + steps(net, torch.optim.SGD(net.parameters(), 0.1)), [net]


class Late(nn.Module):
    def forward(self, x):
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        return self.net(x)


def late_build():
    net = Late()
    net(batches(1)[0])
    return steps(net, torch.optim.AdamW(net.parameters())), [net]


def like_that_of_timm():
    net = Net()
    ema = copy.deepcopy(net).eval()
    optimizer, losses = torch.optim.AdamW(net.parameters(), fused=True), []
    for x in batches(3):
        losses += steps(net.train(), optimizer, 1)
        for mine, other in zip(ema.state_dict().values(), net.state_dict().values(), strict=True):
            mine.lerp_(other, 0.5)
        with torch.no_grad():
            losses += [net.eval()(x).mean().item(), ema(x).mean().item()]
    return losses, [net, ema]


def compiled():
    net, other = Net(), Net()
    other.compile(backend="eager")
    call = torch.compile(net, backend="eager")
    losses = steps(net, torch.optim.AdamW(net.parameters()), call=call)
    return losses + steps(other, torch.optim.AdamW(other.parameters())), [net, other]


def data_parallel_and_parts():
    net = Net()
    losses = steps(net, torch.optim.AdamW(net.parameters()), call=nn.DataParallel(net))
    return [*losses, net.encoder(batches(1)[0]).mean().item()], [net]


def served():
    net, clips = Net().eval(), nn.Hardtanh(-3, 3)
    inputs = [
        clips(x) for x in batches(12)
    ]  # a data set calls modules of its own before the network
    with ThreadPoolExecutor(4) as threads:  # as a server does
        return [each.mean().item() for each in threads.map(net, inputs)], [net]


def traced():
    net, x = Net().eval(), batches(1)[0]
    exported = torch.export.export(net, (x,)).module()
    gradient = torch.func.grad(lambda given: functional_call(net, given, x).mean())
    losses = [each.sum().item() for each in gradient(dict(net.named_parameters())).values()]
    calls = [exported, torch.fx.symbolic_trace(net), net]
    return [*losses, *(call(x).mean().item() for call in calls)], [net]


def views():  # of outputs, which torch refuses where they are in channels-last; `reshape` works
    net = Net()
    return [net(x).view(-1).sum().item() for x in batches(1)], [net]


REFUSED = pytest.param(views, marks=pytest.mark.xfail(raises=RuntimeError, strict=True))
PROGRAMS = [REFUSED, mixed_precision_and_accumulation, folds, resumed, assigned_checkpoint, late_build, like_that_of_timm, compiled, data_parallel_and_parts, served, traced]  # fmt: skip


@contextmanager
def session(recipe=RECIPE, **options):
    found = Outside(recipe, **options).start()
    try:
        yield found
    finally:
        found.stop()
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__) == TORCH


# torch's compiler looks at gradients of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_runs_as_without_us_and_is_prepared(program):
    torch.manual_seed(0)
    before, nets = program()
    assert not is_last(*nets)
    del nets
    gc.collect()
    torch.manual_seed(0)
    with session() as found:
        losses, nets = program()
        assert program is traced or nn.Module.__call__ is TORCH[0]  # a call costs nothing any more
    noise = 2e-2 if program is mixed_precision_and_accumulation else 1e-4
    assert losses == pytest.approx(before, rel=noise)
    assert is_last(*nets), [*found.lines()]
    assert [each.left for each in found.found if each.left] == []


def test_a_cast_network_gets_its_first_named_arguments_cast():
    net = Net().eval()
    with session({"half": {"dtype": "bfloat16"}}), torch.no_grad():
        assert net(x=batches(1)[0]).dtype == torch.bfloat16


def test_losses_and_other_classes_are_left_alone():
    net, loss, other = Net(), PerceptualLoss(2, 4, 3), nn.Conv2d(3, 4, 3)
    with session(module="N*t") as found:
        loss(net(batches(1)[0]))
        other(batches(1)[0])
    assert is_last(net)
    assert not is_last(loss, other)
    assert [each.name for each in found.found] == ["Net"]


class Flat(nn.Conv2d):
    def forward(self, x):
        return super().forward(x).view(len(x), -1)


TRACED = torch.jit.trace(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), torch.ones(2, 3, 12, 12))


@pytest.mark.parametrize(
    ("net", "why"),
    [(TRACED, "script"), (Flat(3, 4, 3), "in forward:.*view")],
)
def test_what_cannot_be_prepared_is_said_and_the_program_goes_on(net, why):
    before = steps(net, torch.optim.SGD(net.parameters(), 0.0))
    net.zero_grad()
    with session() as found, pytest.warns(UserWarning, match=f"is not prepared: .*{why}"):
        assert steps(net, torch.optim.SGD(net.parameters(), 0.0)) == before
    assert "is as it was" in next(found.lines())
    assert next(net.parameters()).stride() == (27, 9, 3, 1)


def test_gradients_that_would_be_wrong_leave_the_network_as_it_was():
    net = Net()  # its InstanceNorm has wrong gradients in channels-last, without repair_layout
    with session({"conv2d_memory_format": {}}) as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.eval()(batches(1)[0])  # a trainer's sanity check; the Parameters are trained later
    assert not is_last(net)
    assert "repair_layout" in found.found[0].left


def test_a_network_that_nothing_calls_is_named_at_the_end():
    net, idle, lazy = Net(), nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 3)
    with session() as found:
        net.encoder(batches(1)[0])  # as a constructor that learns sizes does
        steps(net, torch.optim.SGD(net.parameters()), 1)
        lines = "\n".join(found.lines())
    assert "\nNet: 2 of 2 convolutions prepared" in lines
    assert "layout    kept" in lines
    assert "Conv2d" in lines.partition("never called")[2]
    assert (is_last(idle), lazy.has_uninitialized_params()) == (False, True)


def test_outside_is_the_switch_at_the_top_of_a_program():
    found = prepare.outside(RECIPE)
    net = Net()
    steps(net, torch.optim.AdamW(net.parameters()))
    found.stop()
    assert is_last(net)


def test_a_verification_inside_compares_the_model_as_it_is():
    net, other = Net(), Net().eval()
    with session() as found:
        result = prepare.verify(other, copy.deepcopy(other), batches(1)[0])
        net(batches(1)[0])
    assert result.status == "pass"
    assert not is_last(other)
    assert is_last(net)
    assert [each.name for each in found.found] == ["Net"]
