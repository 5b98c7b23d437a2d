"""Each rewrite computes what torch's convolution computes: exactly in integers, at its accuracy in floats."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.core.model.memory_format import canonical_stride
from prepare.steps.repairs import all_rewrites, find_rewrite
from prepare.steps.repairs.base import is_channels_last
from rewritten_modules import LAYOUTS, STRANGE, Served, make, rewritten

NAMES = all_rewrites()
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture
def served(monkeypatch):
    return Served(monkeypatch)


def integers(module, x):
    """Return both with integers in float64, in their layouts."""
    module, x = copy.deepcopy(module).double(), x.double()
    for each in (x, *module.parameters()):
        each.data.copy_(torch.randint(-9, 10, each.shape))
    return module, x


def gradients(module, x, weights=None):
    x = x.detach().requires_grad_()
    y = module(x)
    weights = torch.ones_like(y) if weights is None else weights
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], weights)]


@pytest.mark.parametrize("count", [16, pytest.param(2400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_integers_are_bit_equal_with_torchs(name, count, served):
    for seed in range(count):
        layouts = (*LAYOUTS, *STRANGE)
        layout = layouts[seed % len(layouts)]
        module, x = make(name, seed, layout, exact=True)
        other = rewritten(name, module, {4: "", 5: ""} if seed % 3 == 0 else {})
        with torch.no_grad():
            y, right = other(x), module(x)
        assert torch.equal(y, right), (seed, layout)
        last = "channels_last" if y.dim() == 4 else "channels_last_3d"
        assert y.stride() in (canonical_stride(y.shape, each) for each in ("contiguous", last))
        weights = torch.arange(right.numel(), dtype=right.dtype).remainder(7).view_as(right)
        for ours, theirs in zip(
            gradients(other, x, weights), gradients(module, x, weights), strict=True
        ):
            assert torch.equal(ours, theirs), (seed, layout)
            assert ours.dtype == theirs.dtype
    assert served.count == 2 * count


@pytest.mark.parametrize(
    ("dtype", "count"),
    [
        *((dtype, 8) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        pytest.param(torch.float32, 2400, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_at_most_that_of_torchs_kernel(name, dtype, count):
    ours, torchs = {}, {}
    for seed in range(count):
        module, x = make(name, seed, LAYOUTS[seed % 4])
        other, module, x = rewritten(name, module).to(dtype), module.to(dtype), x.to(dtype)
        exact = copy.deepcopy(module).double()
        y = exact(x.double())
        weights = torch.linspace(0.5, 1, y.numel()).view_as(y).to(dtype)
        right = gradients(exact, x.double(), weights.double())
        # Errors are parts of the largest sum of absolute terms: a sum that cancels has no digit of its own.
        for parameter in exact.parameters():
            parameter.data.abs_()
        sums = [each.abs().max() for each in gradients(exact, x.double().abs(), weights.double())]
        for errors, each in ((ours, other), (torchs, module)):
            found = gradients(each, x, weights)
            for i, (value, known, whole) in enumerate(zip(found, right, sums, strict=True)):
                wrong = float((value.double() - known).abs().max() / whole.clamp_min(1e-30))
                errors.setdefault(i, []).append(wrong)
    least = 2 * torch.finfo(dtype).eps
    for i in ours:
        assert max(ours[i]) <= max(1.5 * max(torchs[i]), least)
        # The mean of many hides no network; that of a few is too uncertain.
        assert count < 100 or sum(ours[i]) <= 1.5 * sum(torchs[i])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_result_has_the_layout_of_torchs_and_is_no_view(name, layout):
    module, x = make(name, 3, layout)
    module.padding_mode = "zeros"  # another one copies in torch, even for a padding of 0
    x = torch.cat([x, x])
    y, right = rewritten(name, module)(x), module(x)
    if y.dim() == 5 and not is_channels_last(
        right
    ):  # torch's kernel of one sample gives contiguous
        assert y.is_contiguous() or layout != "contiguous"
    else:
        assert y.stride() == right.stride()
    assert not y._is_view()
    y.detach_()


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_equal(name):
    module, x = integers(*make(name, 1))
    found = []
    for each in (module, rewritten(name, module)):
        z = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((each(z) ** 2).sum(), z, create_graph=True)
        found.append(torch.autograd.grad((first**2).sum(), [z, each.weight]))
    for right, ours in zip(*found, strict=True):
        assert torch.equal(ours, right)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", NAMES)
def test_vmap_and_functional_calls_are_equal(name, layout):
    module, x = integers(*make(name, 4, layout))
    xs = torch.stack([x, 2 * x, 3 - x])
    other = rewritten(name, module)
    assert torch.equal(torch.vmap(other)(xs), torch.stack([module(each) for each in xs]))
    per_sample = []
    for each in (module, other):
        parameters = dict(each.named_parameters())

        def loss(values, one, each=each):
            return torch.func.functional_call(each, values, (one,)).square().sum()

        per_sample.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, xs))
    assert all(torch.equal(per_sample[0][key], per_sample[1][key]) for key in per_sample[0])


@pytest.mark.parametrize("name", NAMES)
def test_other_calls_run_torchs_code(name, served):
    module, x = make(name, 8)
    other = rewritten(name, module)
    for given in (x[:0], x[0]):
        before = served.count
        assert torch.equal(other(given), module(given))
        assert served.count == before
    for wrong in (x.double(), torch.cat([x, x], 1)):
        with pytest.raises(RuntimeError) as torchs:
            module(wrong)
        with pytest.raises(RuntimeError) as ours:
            other(wrong)
        assert str(ours.value) == str(torchs.value)


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_product_copies_neither_the_weight_nor_a_patch():
    for last in (torch.contiguous_format, torch.channels_last_3d):
        module = nn.Conv3d(8, 4, (2, 4, 4), (2, 4, 4)).to(memory_format=last)
        x = torch.randn(5, 8, 2, 4, 4).contiguous(memory_format=last)
        other = rewritten("linear", module)
        with torch.no_grad(), Operators() as seen:
            other(x)
        assert seen.names - {"view", "permute", "t", "detach"} == {"addmm"}


@pytest.mark.parametrize("kernel", [(1, 2, 2), (2, 1, 1)])
def test_one_sample_of_one_frame_trains_groups_rightly(kernel):
    last = torch.channels_last_3d  # torch's grouped kernels read the stride of a batch of one
    for groups, outputs in ((2, 4), (1, 1)):
        module = nn.Conv3d(4, outputs, kernel, groups=groups)
        module, x = integers(module, torch.ones(1, 4, 1 if kernel[0] == 1 else 2, 3, 3))
        right = gradients(module, x)
        for weight in (torch.contiguous_format, last):
            other = rewritten("lower_rank", module.to(memory_format=weight))
            ours = gradients(other, x.contiguous(memory_format=last))
            assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


class TestOneFrame:
    """Frames of zeros are proved or read; all else is torch's."""

    def test_a_cache_of_earlier_frames_runs_torchs_code(self, served):
        module, x = nn.Conv3d(4, 6, 3), torch.randn(1, 4, 3, 6, 6)
        other = rewritten("one_frame", module)
        assert torch.equal(other(x), module(x))
        x[:, :, :2, 3, 3] = 0  # the pixel that is read first
        assert torch.equal(other(x), module(x))
        assert served.count == 0

    def test_zeros_that_need_a_gradient_get_it(self, served):
        module, x = integers(nn.Conv3d(4, 6, 3), torch.randn(1, 4, 3, 6, 6))
        x[:, :, :2] = 0
        ours, right = (gradients(each, x)[1] for each in (rewritten("one_frame", module), module))
        assert right[:, :, 0].abs().sum() > 0
        assert torch.equal(ours, right)
        assert served.count == 0

    def test_a_padding_that_is_too_short_is_no_proof(self, served):
        module, x = integers(nn.Conv3d(4, 6, 3), torch.zeros(1, 4, 2, 6, 6))
        x.zero_()
        other = rewritten("one_frame", module)
        found = []
        for each in (other, module):
            z = x.clone().requires_grad_()
            y = each(F.pad(z, (0, 0, 0, 0, 1, 0)))
            found.append(torch.autograd.grad(y.sum(), z)[0])
        assert torch.equal(*found)
        assert served.count == 0

    def test_a_nan_in_an_earlier_frame_reaches_the_result(self):
        module, x = nn.Conv3d(4, 6, 3), torch.zeros(1, 4, 3, 6, 6)
        x[0, 0, 0, 0, 0] = float("nan")
        assert rewritten("one_frame", module)(x).isnan().any()


STRUCTURES = [
    ("linear", nn.Conv2d(3, 4, 3), "stride"),
    ("linear", nn.Conv2d(3, 4, 2, 2, padding=1), "padding"),
    ("linear", nn.Conv2d(4, 4, 2, 2, groups=2), "groups"),
    ("linear", nn.Conv2d(3, 4, 2, 2, dilation=2), "dilation"),
    ("linear", nn.ConvTranspose2d(3, 4, 2, 2), "ConvTranspose2d"),
    ("pointwise", nn.Conv2d(3, 4, 2), "one pixel"),
    ("pointwise", nn.Conv2d(3, 4, 1, 2), "stride"),
    ("lower_rank", nn.Conv3d(3, 4, 3), "kernel"),
    ("lower_rank", nn.Conv3d(3, 4, (1, 3, 3), 2), "stride"),
    ("one_frame", nn.Conv3d(3, 4, (1, 3, 3)), "one tap"),
    ("one_frame", nn.Conv3d(3, 4, 3, dilation=2), "dilation"),
    ("one_frame", nn.Conv3d(3, 4, 3, padding="same"), "padding"),
]


@pytest.mark.parametrize(("name", "module", "reason"), STRUCTURES)
def test_a_structure_that_does_not_fit_says_why(name, module, reason):
    assert reason in find_rewrite(name).reason(module)
    assert not find_rewrite(name).fits(module)
