"""Optimizer state follows its parameters: training gives the same weights, with every torch optimizer."""

import copy
import inspect
import io
import types

import pytest
import torch
from torch import nn, optim

from prepare.errors import (
    ConfigError,
    DriftError,
    KnownIssueWarning,
    UntrainedWarning,
)
from prepare.pipeline import Pipeline, relayout

# Few optimizers train an embedding of sparse gradients, and the network has one.
pytestmark = pytest.mark.filterwarnings("ignore::prepare.errors.UntrainedWarning")
FLAT = Pipeline.from_config({"conv2d_memory_format": {}})
BACK = Pipeline.from_config({"conv2d_memory_format": {"memory_format": "contiguous"}})
# Options with which an optimizer holds all the state that it can.
OPTIONS = {
    "Adam": {"amsgrad": True},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9},
}
# Flattens gradients with .view(-1), which a channels-last one does not take (pytorch#130346).
CONTIGUOUS_ONLY = ("LBFGS",)
NAMES = sorted(
    name
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
)


def implementations(name):
    """`plain`, and `foreach` and `fused` where this optimizer has them."""
    known = inspect.signature(getattr(optim, name)).parameters
    return ["plain", *(how for how in ("foreach", "fused") if how in known)]


EVERY = [(n, how) for n in NAMES if n not in CONTIGUOUS_ONLY for how in implementations(n)]
FUSED = [(name, how) for name, how in EVERY if how == "fused"]
each = pytest.mark.parametrize(("name", "how"), EVERY)


class Net(nn.Module):
    """Something for every optimizer: convolutions, a linear layer, and an embedding of sparse gradients."""

    def __init__(self):
        super().__init__()
        # Without a bias before the norm: its gradient is noise, which Rprop would follow.
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 1),
            nn.Tanh(), nn.Conv2d(8, 4, 3),
        )  # fmt: skip
        self.head = nn.Linear(4, 4)
        self.table = nn.Embedding(5, 4, sparse=True)

    def forward(self, x):
        index = torch.arange(len(x))
        return self.head(self.body(x).mean((2, 3))) + self.table(index)


def network():
    torch.manual_seed(0)
    return Net().double()


def make(name, how, model):
    """Return the optimizer, with the parameters that it can train."""
    kind = getattr(optim, name)
    options = dict(OPTIONS.get(name, {}))
    if "foreach" in inspect.signature(kind).parameters:
        options |= {"fused": True} if how == "fused" else {"foreach": how == "foreach"}
    table = model.table.weight
    held = [parameter for parameter in model.parameters() if parameter is not table]
    held = {"SparseAdam": [table], "Muon": [model.head.weight]}.get(name, held)
    return kind(held, lr=1e-2, **options)


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        model(torch.randn(2, 3, 12, 12, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)


def trained(name, how, model=None):
    """Return a network in training, its optimizer, and the same in contiguous format."""
    model, reference = model or network(), network()
    optimizer, other = make(name, how, model), make(name, how, reference)
    train(model, optimizer)
    train(reference, other)
    return model, optimizer, reference, other


def end_alike(model, optimizer, reference, other):
    train(model, optimizer)
    train(reference, other)
    assert worst(model, reference) < 1e-12


def worst(model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_line(optimizer):
    for parameter, state in optimizer.state.items():
        for tensor in state.values():
            if torch.is_tensor(tensor) and tensor.shape == parameter.shape:
                assert (tensor.stride(), tensor.dtype) == (parameter.stride(), parameter.dtype)


@each
def test_preparing_before_training_gives_the_contiguous_weights(name, how):
    model, optimizer, reference, _ = trained(name, how, FLAT.apply(network()))
    assert FLAT.check(model, optimizer=optimizer) == []
    assert worst(reference, network()) > 1e-6
    assert worst(model, reference) < 1e-12


@each
def test_preparing_midway_with_the_optimizer_gives_the_same_weights(name, how):
    model, optimizer, *others = trained(name, how)
    FLAT.apply(model, optimizer=optimizer)
    in_line(optimizer)
    end_alike(model, optimizer, *others)


def resumed(name, how, start, *, handed_over):
    """A run in one layout, resumed in its own and in the other: pipeline, model, optimizer, and those two."""
    pipeline, same = (BACK, FLAT) if start == "channels_last" else (FLAT, BACK)
    before = same.apply(network())
    optimizer = make(name, how, before)
    train(before, optimizer)
    saving = (before.state_dict(), optimizer.state_dict())
    runs = []
    for each_pipeline in (pipeline, same):
        model = network()
        optimizer = make(name, how, model)
        each_pipeline.apply(model, optimizer=optimizer if handed_over else None)
        saved = through_a_file(saving)  # an optimizer uses the loaded tensors themselves
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        runs += [model, optimizer]
    return pipeline, *runs


@each
@pytest.mark.parametrize(
    "start", ["contiguous", pytest.param("channels_last", marks=pytest.mark.slow)]
)
def test_resuming_from_the_other_layout_gives_the_same_weights(name, how, start):
    _, model, optimizer, *others = resumed(name, how, start, handed_over=True)
    in_line(optimizer)
    end_alike(model, optimizer, *others)


@each
@pytest.mark.parametrize(
    "start", ["channels_last", pytest.param("contiguous", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore:optimizer. Adagrad")  # its state is there from the start
def test_relayout_converts_an_optimizer_that_apply_did_not_get(name, how, start):
    pipeline, model, optimizer, *others = resumed(name, how, start, handed_over=False)
    out = {drift.where for drift in pipeline.check(model, optimizer=optimizer)}
    moments = {
        f"optimizer state {key} of {path}"
        for path, parameter in model.named_parameters()
        if path
        in (
            "body.0.weight",
            "body.5.weight",
        )  # a 1x1 kernel has the same element order in both layouts
        for key, value in optimizer.state.get(parameter, {}).items()
        if torch.is_tensor(value) and value.shape == parameter.shape
    }
    assert out == moments
    assert relayout(optimizer) is optimizer
    in_line(optimizer)
    assert pipeline.check(model, optimizer=optimizer) == []
    end_alike(model, optimizer, *others)


@pytest.mark.parametrize(("name", "how"), FUSED)
def test_without_the_optimizer_a_fused_one_corrupts_the_weights(name, how):
    """The reason for `optimizer=`: torch reports nothing, and the weights are wrong."""
    model, optimizer, reference, other = trained(name, how)
    with pytest.warns(KnownIssueWarning, match=f"{name}.*optimizer="):
        FLAT.apply(model)
    with pytest.raises(
        DriftError,
        match=r"optimizer state \w+ of body\.0\.weight: stride is \(.*\), prepared as \(\d",
    ):
        FLAT.check(model, optimizer=optimizer, strict=True)
    train(model, optimizer)
    train(reference, other)
    assert worst(model, reference) > 1e-4


def test_parameters_that_no_given_optimizer_trains_are_named():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    FLAT.apply(model, optimizer=optimizer)
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    for call in (FLAT.apply, FLAT.check):
        with pytest.warns(UntrainedWarning, match=r"0\.weight and 3 more .*assign=True"):
            call(model, optimizer=optimizer)
    assert FLAT.check(model) == []


@pytest.mark.filterwarnings("error::prepare.errors.UntrainedWarning")
def test_a_network_that_nobody_trains_needs_no_optimizer():
    backbone, head = nn.Conv2d(3, 8, 3).requires_grad_(False), nn.Linear(8, 2)
    optimizer = optim.SGD(head.parameters(), lr=0.1)
    assert FLAT.check(FLAT.apply(backbone, optimizer=optimizer), optimizer=optimizer) == []
    assert FLAT.check(FLAT.apply(nn.Conv2d(3, 8, 3), optimizer=[]), optimizer=[]) == []


@pytest.mark.filterwarnings("error::prepare.errors.UntrainedWarning")
def test_each_of_two_networks_is_given_every_optimizer():
    nets = [nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)) for _ in range(2)]
    optimizers = [optim.Adam(part.parameters()) for net in nets for part in net]
    for net in nets:
        net(torch.randn(2, 3, 8, 8)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    before = optimizers[2].state[nets[1][0].weight]["exp_avg"].clone()
    FLAT.apply(nets[0], optimizer=optimizers)
    assert FLAT.check(nets[0], optimizer=optimizers) == []
    FLAT.apply(nets[1], optimizer=tuple(optimizers))
    for optimizer in optimizers:
        in_line(optimizer)
        assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1
    assert torch.equal(optimizers[2].state[nets[1][0].weight]["exp_avg"], before)


def test_an_optimizer_given_by_position_is_refused_first():
    net = Net()
    with pytest.raises(TypeError, match="positional"):
        FLAT.apply(net, optim.SGD(net.parameters()))
    assert FLAT.check(net)


def without_state(optimizer):
    """A wrapper of a framework that hands on the groups of parameters, and no state."""
    return types.SimpleNamespace(param_groups=optimizer.param_groups, step=optimizer.step)


@pytest.mark.parametrize(
    ("wrap", "lacks"), [(lambda _: "adam", "param_groups"), (without_state, "state")]
)
def test_what_is_no_optimizer_is_refused_in_one_line(wrap, lacks):
    model = nn.Conv2d(3, 4, 3)
    optimizer = optim.SGD(model.parameters())
    for given in (wrap(optimizer), [optimizer, wrap(optimizer)]):
        with pytest.raises(ConfigError, match=rf"^optimizer: .* {lacks}; give the one") as caught:
            FLAT.apply(model, optimizer=given)
        assert "\n" not in str(caught.value)
    assert FLAT.check(model)


@pytest.mark.parametrize(
    ("weights", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_state_keeps_the_dtype_that_its_optimizer_gave_it(weights, moments):
    model = nn.Conv2d(3, 8, 3).to(weights)
    optimizer = optim.AdamW(model.parameters())
    moment = torch.randn(8, 3, 3, 3, dtype=moments)
    optimizer.state[model.weight] = {"exp_avg": moment.clone()}
    assert FLAT.check(FLAT.apply(model, optimizer=optimizer), optimizer=optimizer) == []
    found = optimizer.state[model.weight]["exp_avg"]
    assert (found.dtype, found.stride()) == (moments, model.weight.stride())
    assert torch.equal(found, moment)
    BACK.apply(model)
    relayout(optimizer)
    assert (found.dtype, found.stride()) == (moments, model.weight.stride())
