"""The repaired batch norm: as exact as torch's contiguous kernel in training, and torch's own otherwise."""

import copy

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline
from prepare.steps import repair_layout
from prepare.steps.repairs import find_repair

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SHAPES = [(2, 64, 128, 128), (8, 33, 56, 56), (4, 16, 96, 97), (2, 16, 16, 32, 33)]
# torch's own error may happen to be 0.
ROUNDING = 2.0**-23


def norm_for(shape: tuple[int, ...], **options) -> nn.Module:
    torch.manual_seed(0)
    module = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](shape[1], **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def repaired(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    assert find_repair("batch_norm").fits(module)
    find_repair("batch_norm").repair(module, {4: "channels_last", 5: "channels_last_3d"})
    return module


def last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=FORMATS[x.dim()])


def run(module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(grad)
    found = {"output": y.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in module.named_buffers()}


def errors(found: dict, exact: dict) -> dict[str, float]:
    # The scale of a mean is that of the numbers, a tenth of which enters the running mean.
    least = {"running_mean": 0.1}
    return {
        name: (
            (found[name].double() - x).abs().max() / max(x.abs().max(), least.get(name, 0))
        ).item()
        for name, x in exact.items()
    }


@pytest.mark.parametrize("mean", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_exact_as_the_contiguous_kernel(shape, mean):
    module = norm_for(shape)
    x, grad = torch.randn(shape) + mean, torch.randn(shape)
    exact = run(copy.deepcopy(module).double(), x.double(), grad.double())
    contiguous = errors(run(copy.deepcopy(module), x, grad), exact)
    found = run(repaired(module), last(x), last(grad))
    for name, error in errors(found, exact).items():
        assert error <= 4 * contiguous[name] + ROUNDING, name
    assert found["output"].stride() == last(x).stride() == found["input"].stride()


@pytest.mark.parametrize(
    "options",
    [{"affine": False}, {"momentum": None}, {"momentum": 0.3}, {"track_running_stats": False}],
    ids=str,
)
def test_it_tracks_the_statistics_as_torch_does(options):
    shape = (4, 16, 64, 64)
    module = norm_for(shape, **options)
    other = repaired(module)
    for _ in range(3):
        x, grad = torch.randn(shape) + 1, torch.randn(shape)
        found, expected = run(other, last(x), last(grad)), run(module, x, grad)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-4, check_stride=False)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (norm_for((1, 16, 1, 1)), torch.randn(2, 16, 32, 32)),
        (norm_for((1, 16, 1, 1)).eval(), torch.randn(4, 16, 64, 64)),
        (norm_for((1, 16, 1, 1)).bfloat16(), torch.randn(4, 16, 64, 64).bfloat16()),
        (norm_for((1, 16, 1, 1)).double(), torch.randn(4, 16, 64, 64).double()),
    ],
    ids=["small", "eval", "bfloat16", "float64"],
)
def test_other_calls_run_torchs_code(module, x):
    x = last(x)
    grad = torch.randn_like(x)
    found, expected = run(repaired(module), x, grad), run(copy.deepcopy(module), x, grad)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_step_repairs_it_and_undoes_it():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
    pipeline = Pipeline.from_config({"repair_layout": {}, "conv2d_memory_format": {}})
    pipeline.apply(net, strict=False)
    assert type(net[1]) is nn.BatchNorm2d
    pipeline = Pipeline.from_config({"repair_layout": {"exact": True}})
    pipeline.apply(net)
    assert type(net[1]).__name__ == "KeepingBatchNorm2d"
    assert not pipeline.plan(net)
    repair_layout.undo(net)
    assert type(net[1]) is nn.BatchNorm2d
