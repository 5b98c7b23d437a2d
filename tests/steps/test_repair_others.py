"""The repairs of pooling, softmax, small 3-d convolutions and computed weights: accurate, same layout."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize, prune

from prepare.audit import audit
from prepare.core.model.memory_format import canonical_stride
from prepare.pipeline import Pipeline
from prepare.steps.repairs import find_repair
from prepare.steps.repairs.base import FORMATS
from repair_errors import errors, laid_out, limits, results

NAMES = {4: "channels_last", 5: "channels_last_3d"}

POOLS = {
    "avg": lambda: nn.AvgPool3d(2),
    "avg overlapping": lambda: nn.AvgPool3d((3, 2, 4), (2, 1, 3), (1, 0, 2)),
    "avg ceil": lambda: nn.AvgPool3d(3, 2, 1, ceil_mode=True),
    "avg ceil without padding counted": lambda: nn.AvgPool3d(3, 2, 1, True, False),
    "avg without padding counted": lambda: nn.AvgPool3d(3, 1, 1, count_include_pad=False),
    "avg with a divisor": lambda: nn.AvgPool3d(3, 2, (1, 0, 1), divisor_override=5),
    "power 2": lambda: nn.LPPool3d(2, 2),
    "power 3": lambda: nn.LPPool3d(3.0, (2, 3, 2), 1, ceil_mode=True),
    "infinite power": lambda: nn.LPPool3d(float("inf"), 2),
    "adaptive avg": lambda: nn.AdaptiveAvgPool3d((3, 2, 4)),
    "adaptive avg with None": lambda: nn.AdaptiveAvgPool3d((None, 1, 3)),
    "adaptive avg to one": lambda: nn.AdaptiveAvgPool3d(1),
    "adaptive max": lambda: nn.AdaptiveMaxPool3d((3, 2, 4)),
    "adaptive max with None": lambda: nn.AdaptiveMaxPool3d((None, 2, 3)),
    "adaptive max to one": lambda: nn.AdaptiveMaxPool3d(1),
    "adaptive avg 2-d to one": lambda: nn.AdaptiveAvgPool2d(1),
    "adaptive avg 2-d": lambda: nn.AdaptiveAvgPool2d((3, None)),
}
SOFTMAXES = {
    "softmax": lambda: nn.Softmax(1),
    "softmax from the end": lambda: nn.Softmax(-4),
    "softmax over the batch": lambda: nn.Softmax(0),
    "softmax over depth": lambda: nn.Softmax(2),
    "softmax over width": lambda: nn.Softmax(-1),
    "softmin": lambda: nn.Softmin(1),
    "log_softmax": lambda: nn.LogSoftmax(1),
    "softmax2d": lambda: nn.Softmax2d(),
}
CONVOLUTIONS = {
    "plain": lambda: nn.Conv3d(4, 6, 3, padding=1),
    "one channel": lambda: nn.Conv3d(1, 8, 3),
    "one output": lambda: nn.Conv3d(4, 1, 3, bias=False),
    "three outputs": lambda: nn.Conv3d(4, 3, 3, padding="same"),
    "seven outputs": lambda: nn.Conv3d(4, 7, (1, 3, 2), padding="valid"),
    "same, of even kernels": lambda: nn.Conv3d(4, 6, (2, 3, 4), padding="same"),
    "strided": lambda: nn.Conv3d(4, 6, 3, stride=(2, 1, 2), padding=(1, 0, 2)),
    "dilated": lambda: nn.Conv3d(4, 6, 3, dilation=(1, 2, 1), padding=2),
    "circular": lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="circular"),
    "replicated": lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="replicate"),
    "product": lambda: nn.Conv3d(4, 6, 1),
    "circular product": lambda: nn.Conv3d(4, 6, 1, padding=1, padding_mode="circular"),
    "strided product": lambda: nn.Conv3d(4, 6, 1, stride=2),
    "padded product": lambda: nn.Conv3d(4, 6, 1, padding=1),
    "transposed": lambda: nn.ConvTranspose3d(4, 16, 2, 2),
    "transposed, padded": lambda: nn.ConvTranspose3d(4, 16, 3, 2, 1, (1, 0, 1), bias=False),
    "transposed, depthwise": lambda: nn.ConvTranspose3d(4, 4, 3, 2, 1, (1, 0, 1), groups=4),
}
EVERY = {
    **{name: ("pooling", make) for name, make in POOLS.items()},
    **{name: ("softmax", make) for name, make in SOFTMAXES.items()},
    **{name: ("conv3d", make) for name, make in CONVOLUTIONS.items()},
}
# One of each class and code path, for tests that need no more.
FEW = (
    "avg ceil", "power 2", "adaptive avg", "adaptive avg to one", "adaptive max",
    "softmax", "softmin", "log_softmax", "softmax2d", "plain", "one output", "product", "transposed",
)  # fmt: skip


def pair(name):
    """Return torch's module, and a repaired copy."""
    repair, make = EVERY[name]
    module = make()
    repaired = copy.deepcopy(module)
    assert find_repair(repair).fits(repaired)
    find_repair(repair).repair(repaired, NAMES)
    assert find_repair(repair).is_repaired(repaired)
    assert isinstance(repaired, type(module))
    return module, repaired


def sample(module, batch=1, channels=4):
    if isinstance(module, nn.LPPool3d):  # roots of negative sums are nan
        return torch.rand(batch, channels, 9, 8, 7)
    channels = getattr(module, "in_channels", channels)
    two = isinstance(module, nn.Softmax2d | nn.AdaptiveAvgPool2d)
    return torch.randn(batch, channels, *((9, 8) if two else (9, 8, 7)))


def is_canonical(x):
    return x.stride() == canonical_stride(x.shape, NAMES[x.dim()])


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


@pytest.mark.parametrize("name", FEW)
def test_under_autocast_the_dtype_is_unchanged(name):
    module, repaired = pair(name)
    x = sample(module)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            new, old = repaired(laid_out(x).to(dtype)), module(x.to(dtype))
        assert new.dtype == old.dtype
        torch.testing.assert_close(new, old, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", FEW)
def test_a_repaired_module_is_copied_pickled_and_predicted(name):
    _, repaired = pair(name)
    x = laid_out(sample(repaired))
    y = repaired(x)
    assert torch.equal(copy.deepcopy(repaired)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(repaired))(x), y)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        predicted = copy.deepcopy(repaired)(mode.from_tensor(x))
    assert (predicted.shape, predicted.stride(), predicted.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("name", FEW)
def test_a_repaired_module_compiles_whole_and_exports(name):
    _, repaired = pair(name)
    x = laid_out(sample(repaired))
    y = repaired(x)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        x.requires_grad_()
        got = torch.compile(repaired, backend=backend, fullgraph=True)(x)
        got.sum().backward()
        torch.testing.assert_close(got, y, atol=1e-5, rtol=1e-5)
    exported = torch.export.export(repaired, (x.detach(),)).module()
    torch.testing.assert_close(exported(x), y, atol=1e-5, rtol=1e-5)


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


def test_a_small_convolution_uses_onednn_forward_and_backward():
    for name in ("plain", "one output", "transposed"):
        module, repaired = pair(name)
        x = laid_out(sample(module)).requires_grad_()
        assert not is_canonical(module(x))
        assert is_canonical(repaired(x))


# Larger than their inputs, and large enough for oneDNN to take its own kernels for bfloat16.
LARGER = {
    "padded": lambda: nn.Conv3d(64, 64, 3, padding=1),
    "same": lambda: nn.Conv3d(64, 64, 5, padding="same"),
    "same, of even kernels": lambda: nn.Conv3d(64, 64, 4, padding="same"),
    "strided": lambda: nn.Conv3d(64, 64, 3, stride=2, padding=(1, 2, 1)),
    "dilated": lambda: nn.Conv3d(64, 64, 3, padding=3, dilation=3),
    "in groups": lambda: nn.Conv3d(64, 64, 5, padding=2, groups=2),
    "transposed": lambda: nn.ConvTranspose3d(64, 64, 3, padding=1),
    "transposed, strided": lambda: nn.ConvTranspose3d(64, 64, 7, 2, 3, (1, 0, 1), bias=False),
    "transposed, dilated": lambda: nn.ConvTranspose3d(64, 64, 3, padding=2, dilation=2),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", LARGER)
def test_bfloat16_gradients_of_a_kernel_larger_than_its_input(name):
    torch.manual_seed(0)
    module = LARGER[name]()
    sizes = [copy.deepcopy(module)(torch.zeros(1, 64, size, 6, 2)).shape for size in (2, 3)]
    find_repair("conv3d").repair(module, NAMES)
    assert [module(torch.zeros(1, 64, size, 6, 2)).shape for size in (2, 3)] == sizes
    for shape in ((2, 64, 2, 2, 2), (1, 64, 2, 6, 4), (64, 2, 2, 2)):
        x = torch.randn(shape)
        exact = results(module, x, torch.float64)
        for value in (x, laid_out(x) if x.dim() == 5 else x):
            actual = results(module, value, torch.bfloat16)
            for error, right in zip(errors(actual, exact), exact, strict=True):
                assert error < 0.03 * right.abs().max()
        assert is_canonical(actual[0]) or x.dim() == 4
        with torch.autocast("cpu"):
            (_, _, weight, *_) = results(module, x, torch.float32)
        assert (weight.double() - exact[2]).abs().max() < 0.03 * exact[2].abs().max()


def test_a_padding_changed_later_is_used_for_a_small_input():
    module = nn.Conv3d(4, 4, 3, padding=1).to(torch.bfloat16)
    module.padding = (2, 2, 2)
    find_repair("conv3d").repair(module, NAMES)
    assert module(torch.randn(1, 4, 2, 2, 2, dtype=torch.bfloat16)).shape == (1, 4, 4, 4, 4)


def test_torchs_own_convolution_runs_where_it_is_fast():
    module, repaired = pair("plain")
    x = laid_out(sample(module))
    torch._C._set_mkldnn_enabled(False)
    try:
        assert torch.equal(repaired(x), module(x))
    finally:
        torch._C._set_mkldnn_enabled(True)
    large = laid_out(torch.randn(1, 4, 80, 80, 3))
    assert torch.equal(repaired(large), module(large))
    double = copy.deepcopy(repaired).double()
    assert not is_canonical(double(x.double()))
    grouped = nn.Conv3d(4, 6, 3, groups=2)
    expected = grouped(x)
    find_repair("conv3d").repair(grouped, NAMES)
    assert torch.equal(grouped(x), expected)
    with pytest.raises(RuntimeError, match="to have 4 channels, but got 3"):
        repaired(x[:, :3].to(memory_format=FORMATS[5]))


def test_a_transposed_convolution_gives_the_requested_size():
    module = nn.ConvTranspose3d(4, 16, 3, 2)
    x = sample(module)
    size = [20, 17, 16]
    expected = module(x, size)
    find_repair("conv3d").repair(module, NAMES)
    torch.testing.assert_close(module(laid_out(x), size), expected)


COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "older weight_norm": lambda module: _older(nn.utils.weight_norm, module),
    "older spectral_norm": lambda module: _older(nn.utils.spectral_norm, module),
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
    "pruned twice": lambda module: prune.random_unstructured(
        prune.l1_unstructured(module, "weight", 0.3), "weight", 0.2
    ),
}
SHAPES = {
    "2-d": lambda: nn.Conv2d(4, 6, 3),
    "1x1": lambda: nn.Conv2d(4, 6, 1),
    "3-d": lambda: nn.Conv3d(4, 6, 3),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
}


def _older(norm, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return norm(module)


def computed(name, shape):
    module = COMPUTED[name](SHAPES[shape]()).eval()
    return module, torch.randn(2, 4, *(5,) * (module.weight.dim() - 2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_repaired_and_audited_as_converted(name, shape):
    module, x = computed(name, shape)
    before, keys = module(x), list(module.state_dict())
    rank = x.dim()
    pipeline = Pipeline.from_config(
        {"repair_layout": {"force": True}, f"conv{rank - 2}d_memory_format": {}}
    )
    model = nn.Sequential(module)
    plan = pipeline.plan(model)
    assert list(module.state_dict()) == keys
    assert not find_repair("computed_weight").is_repaired(module)
    pipeline.apply(model)
    report = audit(model, plan=plan)
    assert report.summary["convolutions"]["converted"] == 1
    assert report.summary["status"]["ineffective"] == 0
    assert list(module.state_dict()) == keys
    torch.testing.assert_close(module(x), before)
    assert is_canonical(module.weight)
    assert not pipeline.plan(model)


@pytest.mark.parametrize("name", COMPUTED)
def test_a_repaired_computed_weight_trains_as_before(name):
    module, x = (each.double() for each in computed(name, "2-d"))
    repair = find_repair("computed_weight")
    attributes, hooks = set(vars(module)), dict(module._forward_pre_hooks)
    modules = [type(each) for each in module.modules()]
    before = _gradients(module, x)
    repair.repair(module, NAMES)
    for new, old in zip(_gradients(module, x), before, strict=True):
        torch.testing.assert_close(new, old)
    repair.repair(module, NAMES)
    assert repair.is_repaired(module)
    assert not repair.fits(module)
    repair.undo(module)
    assert repair.fits(module)
    assert set(vars(module)) == attributes
    assert dict(module._forward_pre_hooks) == hooks
    assert [type(each) for each in module.modules()] == modules


def _gradients(module, x):
    return torch.autograd.grad(module(x).pow(2).sum(), list(module.parameters()))


@pytest.mark.parametrize("name", COMPUTED)
def test_a_parametrization_can_be_removed_after_the_repair(name):
    module, x = computed(name, "3-d")
    find_repair("computed_weight").repair(module, NAMES)
    before = module(x)
    if parametrize.is_parametrized(module):
        parametrize.remove_parametrizations(module, "weight")
    elif name.startswith("pruned"):
        prune.remove(module, "weight")
    else:
        getattr(nn.utils, name.replace("older ", "remove_"))(module)
    assert type(module.weight) is nn.Parameter
    torch.testing.assert_close(module(x), before)
    assert not find_repair("computed_weight").fits(module)
    assert not [row for row in audit(module).rows if row.kind == "computed"]


def test_a_cached_parametrization_stays_channels_last():
    module, x = computed("weight_norm", "2-d")
    find_repair("computed_weight").repair(module, NAMES)
    with parametrize.cached():
        module(x)
        assert is_canonical(module.weight)
        assert module.weight is module.weight
    module.weight = torch.ones_like(module.weight)
    torch.testing.assert_close(module.weight, torch.ones_like(module.weight))


def test_a_parametrization_added_later_is_repaired_again():
    module, x = computed("pruned", "2-d")
    repair = find_repair("computed_weight")
    repair.repair(module, NAMES)
    parametrized, _ = computed("weight_norm", "2-d")
    repair.repair(parametrized, NAMES)
    parametrizations.spectral_norm(parametrized)
    prune.random_unstructured(module, "weight", 0.2)
    for each in (module, parametrized):
        assert repair.fits(each)
        repair.repair(each, NAMES)
        each(x)
        assert is_canonical(each.weight)


@pytest.mark.parametrize("name", ["weight_norm", "older weight_norm", "pruned"])
def test_a_repaired_computed_weight_is_pickled_and_compiled(name):
    module, x = computed(name, "2-d")
    find_repair("computed_weight").repair(module, NAMES)
    if not parametrize.is_parametrized(module):  # torch cannot pickle a parametrized module
        again = pickle.loads(pickle.dumps(module))
        assert find_repair("computed_weight").is_repaired(again)
    before = module(x)
    torch._dynamo.reset()
    got = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, before)


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
