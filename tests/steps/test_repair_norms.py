"""The repaired norms: as accurate as torch's contiguous norms, and in the layout of their input."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline
from prepare.steps.repairs import find_repair
from small_nets import bits

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# If the largest error of the contiguous kernel happens to be 0: one rounding of the largest number.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}

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
    "ln2d": (lambda: nn.LayerNorm((16, 40, 32)), (16, 40, 32)),
    "ln3d-small": (lambda: nn.LayerNorm((4, 5, 6, 7)), (4, 5, 6, 7)),
}

QUICK_COMPILED = {"in2d-small", "in3d-plain", "gn2d-small", "gn3d-one", "ln3d-small"}


def repaired(module: nn.Module) -> nn.Module:
    """Return a repaired copy of `module`."""
    module = copy.deepcopy(module)
    (repair,) = (
        r for r in map(find_repair, ("instance_norm", "group_norm", "layer_norm")) if r.fits(module)
    )
    repair.repair(module, {4: "channels_last", 5: "channels_last_3d"})
    return module


def make_norm(case: str, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    module = CASES[case][0]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return module


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=FORMATS[x.dim()])


def inputs(case: str, n: int = 2, mean: float = 0.0) -> torch.Tensor:
    return torch.randn(n, *CASES[case][1]) + mean


def is_canonical(x: torch.Tensor) -> bool:
    return x.stride() == torch.empty(x.shape, memory_format=FORMATS[x.dim()]).stride()


def results(module: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def errors_against_float64(
    case: str, *, n: int, mean: float, dtype: torch.dtype, weights: torch.dtype
) -> list[tuple[str, float, float, float]]:
    """Yield the largest errors of the repair and of torch's contiguous kernel, and the largest number."""
    module = make_norm(case).to(weights)
    x, grad = inputs(case, n, mean).to(dtype), torch.randn(n, *CASES[case][1]).to(dtype)
    exact = results(copy.deepcopy(module).double(), x.double(), grad.double())
    contiguous = results(module, x, grad)
    actual = results(repaired(module), channels_last(x), channels_last(grad))
    assert is_canonical(actual[0])
    assert is_canonical(actual[1])
    return [
        (name, _largest(our - right), _largest(their - right), _largest(right))
        for name, our, their, right in zip(
            ("output", "input", "weight", "bias"), actual, contiguous, exact, strict=False
        )
    ]


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "mean", [0, *(pytest.param(mean, marks=pytest.mark.slow) for mean in (10, 100)), 1000]
)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=["float32", "bfloat16", "mixed"],
)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_as_accurate_as_contiguous_ones(case, dtype, weights, mean, n):
    for what, actual, expected, size in errors_against_float64(
        case, n=n, mean=mean, dtype=dtype, weights=weights
    ):
        # A weight gradient is a sum over the whole input: allow one rounding of each term.
        spared = ROUNDING[weights if what in ("weight", "bias") else dtype] * size
        assert actual <= 4 * max(expected, spared), (what, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mean", [0, 10, 100, 1000])
def test_a_large_volume_is_as_accurate_as_a_contiguous_one(mean, monkeypatch):
    monkeypatch.setitem(
        CASES, "large", (lambda: nn.InstanceNorm3d(32, affine=True), (32, 48, 48, 48))
    )
    for what, actual, expected, _ in errors_against_float64(
        "large", n=1, mean=mean, dtype=torch.float32, weights=torch.float32
    ):
        assert actual <= 4 * expected, what


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(4, 8), nn.LayerNorm((8, 24, 24))]
)
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
    (net(channels_last(x).requires_grad_()) ** 2).sum().backward()
    assert seen == [True]
    largest = max(_largest(p.grad) for p in exact.parameters())
    for actual, right in zip(net.parameters(), exact.parameters(), strict=True):
        assert _largest(actual.grad - right.grad) < 1e-5 * largest
    weight, step = exact[0].weight, 1e-5
    values = []
    for shift in (step, -2 * step):
        weight.data[2, 1, 0, 1] += shift
        values.append((exact(x.double()) ** 2).sum().item())
    difference = (values[0] - values[1]) / (2 * step)
    assert net[0].weight.grad[2, 1, 0, 1].item() == pytest.approx(
        difference, rel=1e-3, abs=1e-5 * largest
    )


@pytest.mark.parametrize("case", CASES)
def test_backward_and_double_backward_match_finite_differences(case):
    module = repaired(make_norm(case)).double()
    shape = {4: (2, 4, 3), 5: (2, 4, 3, 2)}[len(CASES[case][1]) + 1]
    c = CASES[case][1][0]
    if isinstance(module, nn.LayerNorm):
        module = repaired(nn.LayerNorm((c, *shape[1:]))).double()
    x = channels_last(torch.randn(shape[0], c, *shape[1:], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(module, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(module, x, fast_mode=True)


@pytest.mark.parametrize("case", ["in2d", "gn3d", "ln2d"])
def test_double_backward_equals_that_of_a_contiguous_input(case):
    def penalty(module, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).pow(3).mean(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum() * 1e3, [x, *module.parameters()])

    module, x = make_norm(case), inputs(case)
    for actual, expected in zip(
        penalty(repaired(module), channels_last(x)), penalty(module, x), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_equal_those_of_torch(momentum, affine):
    torch.manual_seed(0)
    expected = nn.InstanceNorm2d(6, momentum=momentum, affine=affine, track_running_stats=True)
    actual = repaired(expected)
    for _ in range(3):
        x = torch.randn(3, 6, 40, 70) * 2 + 5
        torch.testing.assert_close(actual(channels_last(x)), expected(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.state_dict(), expected.state_dict())
    actual.eval()
    expected.eval()
    x = torch.randn(1, 6, 40, 70)
    for one, other in zip(
        results(actual, channels_last(x), channels_last(x)), results(expected, x, x), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert is_canonical(actual(channels_last(x)))
    assert bits(actual.running_mean) != bits(torch.zeros(6)) or not momentum
    for module in (actual, expected):  # smaller than eps
        module.running_var.fill_(1e-6)
    torch.testing.assert_close(actual(channels_last(x)), expected(x), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_a_contiguous_input_gives_torchs_own_bits(case):
    module, x = make_norm(case), inputs(case)
    y = repaired(module)(x)
    assert y.is_contiguous()
    assert bits(y) == bits(module(x))


@pytest.mark.parametrize("case", CASES)
def test_unbatched_and_empty_inputs_give_what_torch_gives(case):
    module = make_norm(case)
    for x in (inputs(case)[0], inputs(case, 0)):
        x = channels_last(x) if x.dim() in FORMATS else x
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
        (nn.LayerNorm((4, 3, 3)), (2, 3, 3, 4)),
        (nn.InstanceNorm2d(4, affine=True).bfloat16(), (2, 4, 3, 3)),
        (nn.GroupNorm(2, 4).half(), (2, 4, 3, 3)),
    ],
    ids=str,
)
def test_errors_are_those_of_torch(module, shape):
    outcome = _outcome(repaired(module), channels_last(torch.randn(shape)))
    assert outcome == _outcome(module, torch.randn(shape))
    assert issubclass(outcome[0], Exception)


def test_mismatched_channels_give_torchs_warning():
    module, x = nn.InstanceNorm2d(4), torch.randn(2, 5, 3, 3)
    with pytest.warns(UserWarning, match="does not match num_features"):
        y = repaired(module)(channels_last(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(y, module(x))


@pytest.mark.parametrize("case", ["in2d", "in2d-small", "gn2d", "ln2d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtype_of_torch(case, dtype):
    module, x = make_norm(case), inputs(case).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = repaired(module)(channels_last(x)), module(x)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", CASES)
def test_a_repaired_norm_is_still_the_same_module(case, tmp_path):
    module, x = make_norm(case), channels_last(inputs(case))
    actual = repaired(module)
    kind = type(module)
    assert isinstance(actual, kind)
    assert actual.state_dict().keys() == module.state_dict().keys()
    assert repr(actual).partition("(")[2] == repr(module).partition("(")[2]
    actual.register_forward_hook(lambda *_: None)
    for again in (copy.deepcopy(actual), pickle.loads(pickle.dumps(repaired(module)))):
        assert type(again) is type(actual)
        assert bits(again(x)) == bits(actual(x))
    torch.save(repaired(module), tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert bits(loaded(x)) == bits(actual(x))


# One of each code path to compile: the sizes of the others are the arithmetic's.
COMPILED = [
    pytest.param(case, marks=() if case in QUICK_COMPILED else pytest.mark.slow) for case in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_a_repaired_norm_compiles_as_one_graph_and_trains(case, n, backend):
    torch._dynamo.reset()
    module, x, grad = make_norm(case), inputs(case, n), inputs(case, n)
    compiled = torch.compile(repaired(module), fullgraph=True, backend=backend)
    actual = results(compiled, channels_last(x), channels_last(grad))
    assert is_canonical(actual[0])
    assert is_canonical(actual[1])
    for one, other in zip(actual, results(module, x, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_a_repaired_norm_exports_with_any_batch_size(case):
    module, x = repaired(make_norm(case)).eval(), channels_last(inputs(case, 3))
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    y = program.module()(channels_last(inputs(case, 5)))
    assert y.shape[0] == 5
    torch.testing.assert_close(program.module()(x), module(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_and_the_meta_device_show_the_layout(case):
    module = repaired(make_norm(case))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        y = module(channels_last(inputs(case)))
    assert is_canonical(y)
    assert is_canonical(module.to("meta")(channels_last(inputs(case)).to("meta")))


# torch compiles its own derivative formula for `jvp`.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", ["in2d", "gn2d", "ln2d"])
def test_function_transforms_work_on_a_repaired_norm(case):
    module, x = make_norm(case), inputs(case, 3)

    def loss(net, x):
        return net(x).pow(3).mean()

    actual, expected = (
        torch.func.grad(loss, 1)(m, v)
        for m, v in ((repaired(module), channels_last(x)), (module, x))
    )
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6)
    each = torch.func.vmap(repaired(module))(torch.stack([channels_last(x)] * 2))
    torch.testing.assert_close(each[1], module(x), rtol=1e-3, atol=1e-4)
    tangent = torch.randn_like(x)
    _, actual = torch.func.jvp(repaired(module), (channels_last(x),), (channels_last(tangent),))
    _, expected = torch.func.jvp(module, (x,), (tangent,))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_gradients_of_any_layout_become_channels_last():
    module, x = make_norm("in2d"), inputs("in2d", 1)
    grad = torch.randn(x.shape)
    # The strides that a view leaves at batch 1: channels-last to `is_contiguous`, and not canonical.
    odd = channels_last(grad).as_strided(x.shape, (32, 1, 48 * 32, 32))
    wanted = results(module, x, grad)
    for gradient in (grad, channels_last(grad), odd, grad.flip(3).flip(3)):
        actual = results(repaired(module), channels_last(x), gradient)
        assert is_canonical(actual[1])
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_ambiguous_strides_follow_the_intended_format():
    norm = repaired(nn.GroupNorm(1, 1))
    x = torch.randn(2, 1, 5, 5)
    assert norm(x).stride() == (25, 25, 5, 1)
    assert norm(channels_last(x)).stride() == (25, 1, 5, 1)


def test_inf_and_nan_stay_in_their_channel():
    x = inputs("in2d", 1)
    x[0, 3, 5, 5] = float("nan")
    actual, expected = repaired(make_norm("in2d"))(channels_last(x)), make_norm("in2d")(x)
    assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize(
    "act", [nn.LeakyReLU(inplace=True), nn.ReLU(inplace=True)], ids=["leaky", "relu"]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_an_inplace_activation_can_follow_in_training(act, batch):
    # 96 x 96: large enough for the repair's own backward.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.InstanceNorm2d(32, affine=True), act)
    reference = copy.deepcopy(model)
    steps = {"conv2d_memory_format": {}, "repair_layout": {}}
    Pipeline.from_config(steps).apply(model)
    x = torch.randn(batch, 3, 96, 96)
    for each in (model, reference):
        (each(x.to(memory_format=torch.channels_last)) ** 2).mean().backward()
    for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
        scale = max(1e-3, float(expected.grad.abs().max()))
        assert (actual.grad - expected.grad).abs().max() < 1e-4 * scale


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
