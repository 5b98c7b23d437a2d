"""Large convolutions with few output pixels run as a matrix product: accurate, in the same layout, no copies."""

import copy

import pytest
import torch
from torch import nn

from prepare.core.model import known_issues
from prepare.core.model.memory_format import canonical_stride
from prepare.pipeline import Pipeline
from prepare.steps.repairs import convolutions, find_repair
from prepare.steps.repairs.base import FORMATS
from repair_errors import errors, limits, results

NAMES = {4: "channels_last", 5: "channels_last_3d"}

# Each with a spatial input size that gives few output pixels.
FEW_PIXELS = {
    "padded": (lambda: nn.Conv2d(96, 320, 3, padding=1), (6, 6)),
    "without a bias": (lambda: nn.Conv2d(96, 320, 3, bias=False), (8, 8)),
    "strided": (lambda: nn.Conv2d(96, 320, 3, stride=(2, 1), padding=(1, 0)), (9, 6)),
    "of one pixel": (lambda: nn.Conv2d(512, 512, 1), (6, 6)),
    "of one pixel, strided": (lambda: nn.Conv2d(512, 512, 1, 2, bias=False), (12, 11)),
    "one pixel out": (lambda: nn.Conv2d(96, 320, 3), (3, 3)),
    "3-d": (lambda: nn.Conv3d(64, 320, 3, padding=1), (2, 3, 4)),
    "3-d, larger than its input": (lambda: nn.Conv3d(32, 128, 5, padding=2), (2, 2, 2)),
    "3-d, of one pixel": (lambda: nn.Conv3d(512, 512, 1), (2, 3, 4)),
}


def repaired(module):
    """Return the module in channels-last, and a repaired copy of it."""
    plain_conv = copy.deepcopy(module).to(memory_format=FORMATS[module.weight.dim()])
    repaired_conv = copy.deepcopy(plain_conv)
    find_repair(f"conv{module.weight.dim() - 2}d").repair(repaired_conv, NAMES)
    return plain_conv, repaired_conv


def example(name, batch=1):
    torch.manual_seed(0)
    make, size = FEW_PIXELS[name]
    module = make()
    x = torch.randn(batch, module.in_channels, *size)
    return module, x.to(memory_format=FORMATS[x.dim()])


def products(monkeypatch):
    """Return a list that gets an item for each product from now on."""
    calls, product = [], convolutions.multiply
    monkeypatch.setattr(convolutions, "multiply", lambda *args: calls.append(1) or product(*args))
    return calls


@pytest.mark.parametrize(
    ("batch", "dtype"),
    [
        (1, torch.float32),
        (2, torch.bfloat16),
        pytest.param(1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(2, torch.float32, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", FEW_PIXELS)
def test_a_product_is_as_accurate_and_keeps_the_layout(name, batch, dtype, monkeypatch):
    calls = products(monkeypatch)
    module, x = example(name, batch)
    _, repaired_conv = repaired(module)
    exact = results(module, x, torch.float64)
    assert not calls
    if batch == 2:  # twice as many pixels
        monkeypatch.setattr(known_issues, "_MIN_CHANNELS_PER_PIXEL", 4)
    actual = results(repaired_conv, x, dtype)
    assert calls == [1]
    for error, limit in zip(errors(actual, exact), limits(module, x, dtype, exact), strict=True):
        assert error <= limit
    for t in actual[:3]:
        assert t.stride() == canonical_stride(t.shape, NAMES[t.dim()])


def test_torchs_convolution_runs_where_a_product_does_not_apply(monkeypatch):
    calls = products(monkeypatch)
    module, x = example("padded")
    plain_conv, repaired_conv = repaired(module)
    for value in (
        torch.cat([x, x]),  # more pixels than an eighth of the channels
        x.contiguous(),
        x[0],
    ):
        assert torch.equal(repaired_conv(value), plain_conv(value))
    assert torch.equal(
        copy.deepcopy(repaired_conv).double()(x.double()), plain_conv.double()(x.double())
    )
    with torch.autocast("cpu"):
        assert repaired_conv(x).dtype == torch.bfloat16
    contiguous = copy.deepcopy(repaired_conv).to(memory_format=torch.contiguous_format)
    contiguous(x)
    with pytest.raises(RuntimeError, match="to have 96 channels, but got 95"):
        repaired_conv(x[:, :95].to(memory_format=torch.channels_last))
    assert not calls
    repaired_conv(x)
    assert calls


@pytest.mark.parametrize("laid", [True, False], ids=["channels_last", "contiguous"])
@pytest.mark.parametrize("trained_input", [True, False])
@pytest.mark.parametrize(
    ("channels", "stride", "shape"),
    [(3, 2, (2, 3, 128, 128)), (7, (1, 2), (1, 7, 32, 32)), (1, 3, (4, 1, 33, 33))],
)
def test_a_narrow_strided_convolution_is_repaired_exactly(
    channels, stride, shape, trained_input, laid
):
    torch.manual_seed(0)
    module = nn.Conv2d(channels, 8, 1, stride=stride)
    exact = copy.deepcopy(module).double()
    module.to(memory_format=torch.channels_last)
    convolutions.CONV2D.repair(module, NAMES)
    given = torch.randn(shape)
    x = given.to(memory_format=torch.channels_last) if laid else given.clone()
    double = given.double().requires_grad_(trained_input)
    out, right = module(x.requires_grad_(trained_input)), exact(double)
    gradient = torch.randn_like(right)
    out.backward(gradient.float())
    right.backward(gradient)
    assert out.is_contiguous(memory_format=torch.channels_last) or channels == 1
    pairs = [
        (out, right),
        *((p.grad, q.grad) for p, q in zip(module.parameters(), exact.parameters(), strict=True)),
    ]
    pairs += [(x.grad, double.grad)] if trained_input else []
    for found, expected in pairs:
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(("kernel", "padding"), [(1, 0), (3, "same")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_grouped_convolution_of_one_view_is_repaired(dtype, kernel, padding, batched):
    torch.manual_seed(0)
    module = nn.Conv2d(8, 12, kernel, padding=padding, groups=2).to(dtype)
    exact = copy.deepcopy(module).double()
    module.to(memory_format=torch.channels_last)
    convolutions.CONV2D.repair(module, NAMES)
    assert type(module) is convolutions.KeepingConv2d
    tokens = torch.randn(1, 24, 8, dtype=dtype)
    x = tokens.transpose(1, 2).reshape(1, 8, 4, 6)
    x = x if batched else x[0]
    given, double = x.detach().requires_grad_(), x.double().contiguous().requires_grad_()
    out, right = module(given), exact(double)
    gradient = torch.randn_like(right).to(dtype)
    out.backward(gradient)
    right.backward(gradient.double())
    pairs = [(out, right), (given.grad, double.grad)]
    pairs += [
        (p.grad, q.grad) for p, q in zip(module.parameters(), exact.parameters(), strict=True)
    ]
    for result, expected in pairs:
        scale = float(expected.detach().abs().max())
        assert (
            float((result.double() - expected).detach().abs().max())
            < 4 * torch.finfo(dtype).eps * scale
        )


@pytest.mark.parametrize("groups", [4, 32])
@pytest.mark.parametrize("shape", [(2, 32, 48, 40), (32, 48, 40)], ids=["batch", "no batch"])
@pytest.mark.parametrize("amp", [False, True], ids=["bfloat16", "autocast"])
def test_groups_with_dilation_have_the_weight_gradients_of_contiguous_ones(groups, shape, amp):
    torch.manual_seed(0)
    dtype = torch.float32 if amp else torch.bfloat16
    conv = nn.Conv2d(32, 32, 3, dilation=2, padding=2, groups=groups).to(dtype)
    exact, x = copy.deepcopy(conv).double(), torch.randn(shape).to(dtype)
    steps = {"conv2d_memory_format": {}, "repair_layout": {}}
    for _ in range(3):
        junk = [torch.full((n,), torch.nan) for n in range(100, 5000, 100)]
        del junk
        Pipeline.from_config(steps).apply(conv, amp="bfloat16" if amp else "none")
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = conv(x).float().square().mean()
        found = torch.autograd.grad(loss, conv.weight)[0]
        wanted = torch.autograd.grad(exact(x.double()).square().mean(), exact.weight)[0]
        assert (found - wanted).abs().max() < 0.05 * wanted.abs().max()
