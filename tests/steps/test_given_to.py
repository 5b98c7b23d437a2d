"""What a prepared model can be given to: transforms, tracers, copies."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.steps import half, input_format, keep_layout, repair_layout, repairs

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning"),
    # So does torch's own hook of weight_norm.
    pytest.mark.filterwarnings("ignore:The tensor attribute .* was assigned during export"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]


class Joins(nn.Module):
    """Loses the layout in its own code."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        y = F.pad(self.conv(x), (1, 0, 0, 1))[..., 1:, :-1].clone()
        return torch.cat([x, y, torch.zeros_like(y)], 1).contiguous()


def flat(*more):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *more)


def deep(*more):
    return nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), *more)


FLAT = {"conv2d_memory_format": {}, "repair_layout": {"force": True}}
DEEP = {"conv3d_memory_format": {}, "repair_layout": {"force": True}}
ATTACH = {"input_format": {"attach": True}}
LARGE, CUBE, SMALL = (2, 3, 24, 24), (1, 3, 6, 6, 6), (2, 3, 5, 7)
# A network, its steps, and the shape of its input; the first word is the repair, or the step.
NETS = {
    "instance_norm": (lambda: flat(nn.InstanceNorm2d(8, affine=True)), FLAT, LARGE),
    "group_norm": (lambda: flat(nn.GroupNorm(2, 8)), FLAT, LARGE),
    "batch_norm": (
        lambda: flat(nn.BatchNorm2d(8, track_running_stats=False)),
        FLAT,
        (2, 3, 96, 96),
    ),
    "pooling": (lambda: deep(nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(1)), DEEP, CUBE),
    "softmax": (lambda: flat(nn.Softmax(1)), FLAT, SMALL),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 128, 1), nn.Conv2d(128, 256, 3, padding=1)),
        FLAT,
        (2, 3, 4, 4),
    ),
    "conv3d": (lambda: deep(nn.Conv3d(8, 16, 1), nn.ConvTranspose3d(16, 16, 2, 2)), DEEP, CUBE),
    "computed_weight": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 8, 3))),
        FLAT,
        SMALL,
    ),
    "keep_layout": (Joins, {"conv2d_memory_format": {}, "keep_layout": {}}, SMALL),
    "input_format": (lambda: flat(nn.Tanh()), {"conv2d_memory_format": {}, **ATTACH}, SMALL),
    "half": (
        lambda: flat(nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)),
        {"half": {"dtype": "bfloat16", "keep": ["1"]}, **ATTACH},
        LARGE,
    ),
    "half of a block": (
        lambda: nn.Sequential(flat(nn.Tanh()), nn.Conv2d(8, 4, 1)),
        {"half": {"dtype": "bfloat16", "keep": ["0"]}, **ATTACH},
        SMALL,
    ),
    "fuse_conv_bn": (
        lambda: flat(nn.BatchNorm2d(8)).eval(),
        {"conv2d_memory_format": {}, "fuse_conv_bn": {}},
        SMALL,
    ),
}


def parameters(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def numbers(y):
    """Return two numbers of an output, neither of which a norm makes constant."""
    weight = torch.arange(y.numel(), dtype=torch.float32).sin().view(y.shape)
    return torch.stack([(y * weight).sum(), (y * weight.flip(1)).sin().sum()])


def loss(model, values, x):
    return numbers(functional_call(model, values, (x,)).float()).sum()


def each_gradient(model, x):
    def of_sample(values, sample):
        return loss(model, values, sample[None])

    return vmap(grad(of_sample), (None, 0))(parameters(model), x)


def traced(model, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return torch.jit.trace(model, x, check_trace=False)(x.sin())


def symbolic(model, x):
    x = x.bfloat16() if any(p.dtype == torch.bfloat16 for p in model.parameters()) else x
    return torch.fx.symbolic_trace(model)(x)


SCRIPT, FX = "`torch.jit.script`", "`torch.fx.symbolic_trace`"
PICKLE, COPY = "`pickle` and spawned processes", "`copy.deepcopy`"
# What takes a model: a function of a model and an input.
GIVEN_TO = {
    "`torch.func.vmap`": lambda model, x: vmap(model)(torch.stack([x, 2 * x])),
    "`vmap(grad(functional_call))`": each_gradient,
    "`torch.func.grad`": lambda model, x: grad(lambda v: loss(model, v, x))(parameters(model)),
    "`torch.func.jvp`": lambda model, x: jvp(model, (x,), (x.cos(),)),
    COPY: lambda model, x: copy.deepcopy(model)(x),
    PICKLE: lambda model, x: pickle.loads(pickle.dumps(model))(x),
    "`torch.export`": lambda model, x: torch.export.export(model, (x,)).module()(x.sin()),
    "`torch.jit.trace`": traced,
    FX: symbolic,
    SCRIPT: lambda model, x: torch.jit.script(model)(x),
}
# The steps that refuse with one line, and what it says.
REFUSED = {
    (SCRIPT, "repair_layout"): "from prepare.steps import repair_layout; repair_layout.undo",
    (SCRIPT, "keep_layout"): "from prepare.steps import keep_layout; keep_layout.undo(model)",
    (SCRIPT, "input_format"): "from prepare.steps import input_format; input_format.undo(model)",
    (SCRIPT, "half"): ".undo(model)",
    (FX, "half of a block"): "from prepare.steps import half; half.undo",
}
# What torch refuses for this module, whatever its weight's layout.
TORCH_REFUSES = {(SCRIPT, "computed_weight"), (PICKLE, "computed_weight")}


def step_of(net):
    """Return the step that a network is about."""
    first = net.partition(" ")[0]
    return "repair_layout" if first in repairs.all_repairs() else first


def pair(net):
    """Return the unprepared model, the prepared one, and an input."""
    make, steps, shape = NETS[net]
    models = []
    for each in (({"fuse_conv_bn": {}} if "fuse_conv_bn" in steps else {}), steps):
        torch.manual_seed(0)
        models.append(Pipeline.from_config(each).apply(make(), known_issues="ignore"))
    return *models, torch.randn(shape)


def in_format(x, net):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x if "input_format" in NETS[net][1] else x.to(memory_format=formats[x.dim()])


def assert_same(actual, expected, net):
    actual, expected = (
        [each.detach().float() for each in tree_leaves(one)] for one in (actual, expected)
    )
    scale = max(float(each.abs().max()) for each in expected) + 1e-9
    tolerance = 5e-2 if step_of(net) == "half" else 1e-4
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) < tolerance * scale


# The quick tier has every receiver with a third of the networks, and every network with a third of the receivers.
PAIRS = [
    pytest.param(receiver, net, marks=[pytest.mark.slow] * bool((number + other) % 3))
    for number, receiver in enumerate(GIVEN_TO)
    for other, net in enumerate(NETS)
]


@pytest.mark.parametrize(("receiver", "net"), PAIRS)
def test_a_prepared_model_gives_the_numbers_of_the_unprepared(receiver, net):
    give, (plain, prepared, x) = GIVEN_TO[receiver], pair(net)
    refused = REFUSED.get((receiver, net)) or REFUSED.get((receiver, step_of(net)))
    if (receiver, net) in TORCH_REFUSES:
        for model in (prepared, plain):
            with pytest.raises((RuntimeError, AttributeError, torch.jit.Error)):
                give(model, in_format(x, net))
    elif refused:
        kinds = (PrepareError, AttributeError, torch.fx.proxy.TraceError)
        with pytest.raises(kinds, match=re.escape(refused)) as raised:
            give(prepared, in_format(x, net))
        assert "\n" not in str(raised.value)
        for step in (repair_layout, keep_layout, input_format, half):
            step.undo(prepared)
        if receiver == SCRIPT:
            torch.jit.script(prepared)
    else:
        assert_same(give(prepared, in_format(x, net)), give(plain, x), net)
