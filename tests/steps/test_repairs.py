"""Every repaired module is as accurate as torch's, and keeps the layout."""

import copy

import pytest
import torch
from torch import nn

from prepare.steps.repairs import find_repair
from repair_errors import errors, laid_out, limits, results
from repaired_modules import CONVOLUTIONS, EVERY, NAMES, SOFTMAXES, is_canonical, pair, sample

# One of each class and code path, for tests that need no more.
FEW = (
    "avg ceil", "power 2", "adaptive avg", "adaptive avg to one", "adaptive max",
    "softmax", "softmin", "log_softmax", "softmax2d", "plain", "one output", "product", "transposed",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_a_repaired_module_is_as_accurate_and_keeps_the_layout(name, batch, dtype):
    module, repaired = pair(name)
    channels = 33 if name in SOFTMAXES and batch == 2 else 4
    x = sample(module, batch, channels).to(dtype).float()
    module = module.to(dtype).float()
    repaired.load_state_dict(module.state_dict())
    exact = results(module, x, torch.float64)
    actual = results(repaired, laid_out(x), dtype)
    for error, limit in zip(errors(actual, exact), limits(module, x, dtype, exact), strict=True):
        assert error <= limit
    assert actual[0].dtype == dtype
    if name not in CONVOLUTIONS:
        assert all(is_canonical(each) for each in actual[:2])
    elif dtype == torch.float32 and name != "padded product":
        assert is_canonical(actual[0])
        assert is_canonical(actual[1]) or "circular" in name


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", EVERY)
def test_a_contiguous_input_gives_the_same_bits_as_before(name):
    module, repaired = pair(name)
    x = sample(module)
    for new, old in zip(
        results(repaired, x, torch.float32), results(module, x, torch.float32), strict=True
    ):
        assert torch.equal(new, old)
        assert new.stride() == old.stride()


@pytest.mark.parametrize("name", FEW)
def test_double_backward_is_correct(name):
    _, repaired = pair(name)
    x = sample(repaired)[..., :4, :5]
    if x.dim() == 5:
        x = x[:, :, :5]
    if name in CONVOLUTIONS:  # in float64 the convolutions run torch's code, so compare with that
        exact = _second(copy.deepcopy(repaired).double(), laid_out(x).double())
        actual = _second(repaired, laid_out(x)).double()
        torch.testing.assert_close(actual, exact, atol=1e-4, rtol=1e-4)
        return
    x = laid_out(x.double()[:, :2]).requires_grad_()
    assert torch.autograd.gradgradcheck(repaired, (x,), fast_mode=True)


def _second(module, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(grad.pow(2).sum(), x)[0]


@pytest.mark.parametrize("name", [*FEW, "instance norm", "group norm, one"])
def test_under_autocast_the_dtype_is_unchanged(name):
    module, repaired = pair(name)
    x = sample(module)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            new, old = repaired(laid_out(x).to(dtype)), module(x.to(dtype))
        assert new.dtype == old.dtype
        torch.testing.assert_close(new, old, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("values", ["ties", "nan"])
@pytest.mark.parametrize("size", [3, (2, 4, 3), (9, 8, 7)])
def test_the_indices_of_maxima_are_the_same_numbers(size, values):
    module = nn.AdaptiveMaxPool3d(size, return_indices=True)
    x = torch.randint(0, 3, (2, 5, 9, 8, 7)).float()
    if values == "nan":
        x[torch.rand(x.shape) < 0.02] = torch.nan
    old = module(x)
    find_repair("pooling").repair(module, NAMES)
    new = module(laid_out(x))
    torch.testing.assert_close(new, old, equal_nan=True, atol=0, rtol=0)
    assert all(is_canonical(each) for each in new)


def test_pooling_of_unbatched_or_integer_inputs_runs_torchs_code():
    module, repaired = pair("avg")
    x = torch.randn(4, 6, 6, 6)
    assert torch.equal(repaired(laid_out(x)), module(x))
    whole = torch.randint(0, 99, (1, 4, 6, 6, 6))
    assert torch.equal(repaired(laid_out(whole)), module(whole))


def test_softmax_without_a_valid_dimension_runs_torchs_code():
    module = nn.Softmax(7)
    find_repair("softmax").repair(module, NAMES)
    with pytest.raises(IndexError):
        module(laid_out(torch.randn(1, 4, 3, 3)))
    module.dim = None
    with pytest.warns(UserWarning, match="Implicit dimension"):
        module(laid_out(torch.randn(1, 4, 3, 3)))
    flat = nn.Softmax2d()
    find_repair("softmax").repair(flat, NAMES)
    x = torch.randn(4, 3, 3)
    assert torch.equal(flat(x), torch.softmax(x, 0))
    with pytest.raises(ValueError, match="3D or 4D"):
        flat(laid_out(torch.randn(1, 4, 3, 3, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_a_random_pooling_or_convolution_is_as_accurate_as_before(seed):
    random = torch.Generator().manual_seed(seed)

    def one(*choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    kernel = tuple(one(1, 2, 3) for _ in range(3))
    stride = tuple(one(1, 2, 3) for _ in range(3))
    half = tuple(one(0, k // 2) for k in kernel)
    size = tuple(one(5, 6, 8, 9) for _ in range(3))
    module = one(
        nn.AvgPool3d(kernel, stride, half, one(True, False), one(True, False), one(None, 3)),
        nn.AdaptiveAvgPool3d(tuple(one(None, 1, 2, 3, 5) for _ in range(3))),
        nn.AdaptiveMaxPool3d(tuple(one(None, 1, 2, 3, 5) for _ in range(3))),
        nn.Conv3d(4, one(1, 2, 3, 5, 7, 8), kernel, stride, half, padding_mode=one("zeros", "circular", "replicate")),
        nn.ConvTranspose3d(4, 16, kernel, stride, half),
    )  # fmt: skip
    x = torch.randn(one(1, 2), 4, *size)
    exact = results(module, x, torch.float64)
    allowed = limits(module, x, torch.float32, exact)
    repair = "conv3d" if hasattr(module, "weight") else "pooling"
    find_repair(repair).repair(module, NAMES)
    actual = results(module, laid_out(x), torch.float32)
    for error, limit in zip(errors(actual, exact), allowed, strict=True):
        assert error <= limit
    assert is_canonical(actual[0])
