"""The repaired norms: as accurate as torch's contiguous norms, and in the layout of their input."""

import copy

import pytest
import torch
from torch import nn

from prepare.steps.repairs import find_repair
from repair_errors import laid_out
from repaired_modules import is_canonical
from small_nets import bits

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

# Sizes with and without divisors, so that torch's kernels see them in few lanes and in many.
CASES = {
    "in2d": (lambda: nn.InstanceNorm2d(32, affine=True), (32, 48, 48)),
    "in2d-small": (lambda: nn.InstanceNorm2d(6, affine=True), (6, 9, 7)),
    "in2d-primes": (lambda: nn.InstanceNorm2d(3, affine=True), (3, 97, 101)),
    "in3d": (lambda: nn.InstanceNorm3d(8, affine=True), (8, 16, 20, 24)),
    "in3d-plain": (lambda: nn.InstanceNorm3d(20), (20, 10, 12, 11)),
    "gn2d": (lambda: nn.GroupNorm(4, 32), (32, 32, 40)),
    "gn2d-small": (lambda: nn.GroupNorm(2, 8), (8, 5, 6)),
    "gn3d-one": (lambda: nn.GroupNorm(1, 3), (3, 23, 24, 8)),
    "gn3d": (lambda: nn.GroupNorm(8, 16), (16, 12, 16, 16)),
}


def repaired(module: nn.Module) -> nn.Module:
    """Return a repaired copy of `module`."""
    module = copy.deepcopy(module)
    (repair,) = (r for r in map(find_repair, ("instance_norm", "group_norm")) if r.fits(module))
    repair.repair(module, {4: "channels_last", 5: "channels_last_3d"})
    return module


def make_norm(case: str, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = CASES[case][0]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def inputs(case: str, n: int = 2, mean: float = 0.0) -> torch.Tensor:
    return torch.randn(n, *CASES[case][1]) + mean


def results(module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(4, 8)])
@pytest.mark.parametrize("width", [8, 1], ids=["small", "with a gradient of one stride more"])
def test_network_gradients_at_batch_1_match_float64(norm, width):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), repaired(norm), nn.SiLU(), nn.Conv2d(8, width, 1)
    )
    x = torch.randn(1, 3, 24, 24)
    exact = copy.deepcopy(net).double()
    (exact(x.double()) ** 2).sum().backward()
    nn.utils.convert_conv2d_weight_memory_format(net, torch.channels_last)
    seen = []
    net[0].register_full_backward_hook(lambda _, __, grads: seen.append(is_canonical(grads[0])))
    (net(laid_out(x).requires_grad_()) ** 2).sum().backward()
    assert seen == [True]
    largest = max(_largest(p.grad) for p in exact.parameters())
    for actual, right in zip(net.parameters(), exact.parameters(), strict=True):
        assert _largest(actual.grad - right.grad) < 1e-5 * largest


@pytest.mark.parametrize("name", ["in2d-small", "gn3d-one"])
def test_second_derivatives_match_finite_differences(name):
    make, sizes = CASES[name]
    x = torch.randn(2, sizes[0], *sizes[1:] if "ln" in name else (4, 3, 2)[: len(sizes) - 1])
    module = repaired(make()).double()
    assert torch.autograd.gradgradcheck(
        module, laid_out(x.double()).requires_grad_(), fast_mode=True
    )


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_equal_those_of_torch(momentum, affine):
    torch.manual_seed(0)
    expected = nn.InstanceNorm2d(6, momentum=momentum, affine=affine, track_running_stats=True)
    actual = repaired(expected)
    for _ in range(3):
        x = torch.randn(3, 6, 40, 70) * 2 + 5
        torch.testing.assert_close(actual(laid_out(x)), expected(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.state_dict(), expected.state_dict())
    actual.eval()
    expected.eval()
    x = torch.randn(1, 6, 40, 70)
    for one, other in zip(
        results(actual, laid_out(x), laid_out(x)), results(expected, x, x), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert is_canonical(actual(laid_out(x)))
    assert bits(actual.running_mean) != bits(torch.zeros(6)) or not momentum
    for module in (actual, expected):  # smaller than eps
        module.running_var.fill_(1e-6)
    torch.testing.assert_close(actual(laid_out(x)), expected(x), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_unbatched_and_empty_inputs_give_what_torch_gives(case):
    module = make_norm(case)
    for x in (inputs(case)[0], inputs(case, 0)):
        x = laid_out(x) if x.dim() in FORMATS else x
        assert _outcome(repaired(module), x) == _outcome(module, x)


def _outcome(module, x):
    try:
        y = module(x)
    except (ValueError, RuntimeError, IndexError) as error:
        return type(error), str(error)
    return y.shape, bits(y)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.InstanceNorm2d(4), (2, 4, 1, 1)),
        (nn.InstanceNorm2d(4, affine=True), (2, 5, 3, 3)),
        (nn.InstanceNorm3d(4, affine=True), (2, 4, 3, 3)),
        (nn.InstanceNorm2d(4), (2, 4, 3, 3, 3)),
        (nn.GroupNorm(2, 4), (2, 6, 3, 3)),
        (nn.GroupNorm(4, 4), (1, 4, 1, 1)),
        (nn.InstanceNorm2d(4, affine=True).bfloat16(), (2, 4, 3, 3)),
        (nn.GroupNorm(2, 4).half(), (2, 4, 3, 3)),
    ],
    ids=str,
)
def test_errors_are_those_of_torch(module, shape):
    outcome = _outcome(repaired(module), laid_out(torch.randn(shape)))
    assert outcome == _outcome(module, torch.randn(shape))
    assert issubclass(outcome[0], Exception)


def test_gradients_of_any_layout_become_channels_last():
    module, x = make_norm("in2d"), inputs("in2d", 1)
    grad = torch.randn(x.shape)
    # The strides that a view leaves at batch 1: channels-last to `is_contiguous`, and not canonical.
    odd = laid_out(grad).as_strided(x.shape, (32, 1, 48 * 32, 32))
    wanted = results(module, x, grad)
    for gradient in (grad, laid_out(grad), odd, grad.flip(3).flip(3)):
        actual = results(repaired(module), laid_out(x), gradient)
        assert is_canonical(actual[1])
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_inf_and_nan_stay_in_their_channel():
    x = inputs("in2d", 1)
    x[0, 3, 5, 5] = float("nan")
    actual, expected = repaired(make_norm("in2d"))(laid_out(x)), make_norm("in2d")(x)
    assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("shape", [(2, 8, 16, 16), (2, 8, 1, 1), (1, 8, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("sliced", [False, True])
def test_a_repaired_group_norm_takes_frozen_inputs(shape, groups, sliced):
    torch.manual_seed(0)
    norm, given = nn.GroupNorm(groups, 8), torch.randn(shape)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = (
        torch.cat([given, given], 1).to(memory_format=last)[:, :8]
        if sliced
        else given.to(memory_format=last)
    )
    exact = copy.deepcopy(norm).double()
    find_repair("group_norm").repair(norm, {})
    gradient = torch.randn(shape).to(memory_format=last)
    norm(x).backward(gradient)
    exact(given.double()).backward(gradient.double())
    torch.testing.assert_close(norm.weight.grad.double(), exact.weight.grad, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(norm.bias.grad.double(), exact.bias.grad, rtol=1e-4, atol=1e-4)
