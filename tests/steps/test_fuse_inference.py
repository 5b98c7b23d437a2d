"""The step fuse_inference: random convolutions and what follows them, and every call that torch's code runs."""

import copy
import io
import operator
import pickle
import random

import pytest
import torch
from torch import nn

import prepare
from prepare.app.report.sentences import converted_text
from prepare.audit import audit
from prepare.core.forward.call import call_of
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from prepare.steps import fuse_inference
from prepare.steps.repairs import fused

STEPS = {"conv2d_memory_format": {}, "conv3d_memory_format": {}, "fuse_inference": {}}
PIPELINE = Pipeline.from_config(STEPS)
ACTIVATIONS = (
    *(nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.Sigmoid, nn.ReLU6),
    *(lambda: nn.ReLU(inplace=True), lambda: nn.GELU("tanh"), lambda: nn.LeakyReLU(0.3, True), nn.Tanh),
)  # fmt: skip


def scaled(y, other):
    """Add two numbers as a call of torch that is not fused."""
    return torch.add(other, y, alpha=2)


class Block(nn.Module):
    """Two convolutions with their norms, and a sum: as in a residual network."""

    def __init__(self, channels=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn1, self.act = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        z = self.bn2(self.conv2(y))
        z += y
        return self.act(z)


class Chain(nn.Module):
    """A convolution and what may follow it."""

    def __init__(self, conv, norm, act, adds):
        super().__init__()
        self.conv, self.norm, self.act, self.adds = conv, norm, act, adds

    def forward(self, x, other):
        y = self.norm(self.conv(x))
        if self.adds == "in place":
            y += other
        elif self.adds:
            y = self.adds(y, other)
        return self.act(y)


def lively(net):
    """Give every norm statistics and weights of its own; return the network in evaluation mode."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return net.eval()


def last(shape):
    x = torch.randn(shape)
    return x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    )


@pytest.fixture
def block():
    return PIPELINE.apply(lively(Block()))


@pytest.fixture
def x():
    return last((2, 3, 9, 9))


@pytest.fixture
def calls(monkeypatch):
    """The fused operators that ran, packing not among them: their kind, and the activation in them."""
    ran = []

    def counted(name, run):
        def counting(*args):
            ran.extend([f"{name.rpartition('.')[2]} {args[-3]}"] if "reorder" not in name else [])
            return run(*args)

        return counting

    for name, run in list(fused._OPERATORS.items()):
        monkeypatch.setitem(fused._OPERATORS, name, counted(name, run))
    return ran


def plain(model):
    """Return a copy of a model that runs torch's own code."""
    copied = copy.deepcopy(model)
    PIPELINE.undo(copied)
    return copied


def assert_right(model, *args):
    with torch.no_grad():
        want = plain(model)(*(each.clone() for each in args))
        got = model(*args)
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return got


def random_chain(seed):
    """Return a random chain with its input and what is added, for tensors of integers if the seed is even."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rank, turned = rng.choice((2, 2, 3)), rng.random() < 0.2
    groups = 1 if turned else rng.choice((1, 1, 1, 2, 4))
    inputs, outputs = (groups * rng.choice((1, 2, 3, 8, 16)) for _ in range(2))
    kernel = tuple(rng.choice((1, 2, 3)) for _ in range(rank))
    sizes = {
        "stride": rng.choice((1, 1, 2)),
        "padding": tuple(rng.randint(0, size // 2) for size in kernel),
        "dilation": rng.choice((1, 1, 2)),
        "bias": rng.random() < 0.5,
    }
    kind = ("ConvTranspose" if turned else "Conv") + f"{rank}d"
    conv = getattr(nn, kind)(inputs, outputs, kernel, groups=groups, **sizes)
    norm = getattr(nn, f"BatchNorm{rank}d")(outputs, affine=rng.random() < 0.8)
    act = rng.choice((*ACTIVATIONS, nn.Identity))()
    adds = rng.choice((None, None, operator.add, torch.add, lambda a, b: b + a, scaled, "in place"))
    net = lively(Chain(conv, rng.choice((norm, norm, nn.Identity())), act, adds))
    x = last((rng.randint(1, 3), inputs, *(rng.randint(5, 9) for _ in range(rank))))
    if rng.random() < 0.2:
        net, x = net.bfloat16(), x.bfloat16()
    other = torch.randn_like(conv(x)).detach()
    return net, x, other if rng.random() < 0.8 else other.contiguous()


def check_random(seeds, calls):
    served = 0
    for seed in seeds:
        net, x, other = random_chain(seed)
        right = copy.deepcopy(net).double()(x.double(), other.double()).detach()
        prepared = PIPELINE.apply(copy.deepcopy(net), known_issues="ignore")
        with torch.inference_mode(seed % 2 == 0), torch.no_grad():
            own = net(x, other.clone())
            calls.clear()
            got = prepared(x, other)
        served += bool(calls)
        assert type(got) is torch.Tensor
        assert (got.shape, got.dtype) == (own.shape, own.dtype)
        errors = [(each.double() - right).abs().max().item() for each in (got, own)]
        # Also of numbers before a bounded activation.
        wide = copy.deepcopy(net).double()
        largest = max(each.abs().max() for each in (right, wide.norm(wide.conv(x.double()))))
        floor = torch.finfo(x.dtype).eps * max(largest.item(), 1)
        assert errors[0] <= 1.5 * errors[1] + 4 * floor, (seed, net, errors)
    assert served > 0.7 * len(seeds)


def test_random_chains_are_as_exact_as_torch(calls):
    check_random(range(150), calls)


@pytest.mark.slow
def test_two_thousand_random_chains_are_as_exact_as_torch(calls):
    check_random(range(1000, 3100), calls)


def test_integers_are_bit_equal(calls):
    for seed in range(40):
        net, x, _ = random_chain(seed)
        conv = net.conv.float()
        with torch.no_grad():
            for each in (conv.weight, x := x.float(), *([] if conv.bias is None else [conv.bias])):
                each.copy_(torch.randint(-4, 5, each.shape))
            want, got = conv(x), PIPELINE.apply(nn.Sequential(conv, nn.ReLU()))(x)
        assert got.equal(want.relu())


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_not_a_number_stays_so(act, x):
    x[0, 0, 4, 4] = float("nan")
    model = PIPELINE.apply(nn.Sequential(nn.Conv2d(3, 8, 1), act()).eval())
    with torch.no_grad():
        assert torch.equal(model(x).isnan(), plain(model)(x).isnan())


@torch.no_grad()
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_hidden_by_a_fused_relu(block, x, value):
    block(x)
    block.conv1.weight[0] = value
    for _ in range(2):
        assert torch.equal(block(x).isnan(), plain(block)(x).isnan())
    block.conv1.weight[0] = 1
    assert_right(block, x)


def test_a_block_runs_in_two_calls(block, x, calls):
    plan = Pipeline.from_config(STEPS).plan(lively(Block()))
    assert [action.modules for action in plan.actions if action.step == "fuse_inference"] == [
        ("conv1", "conv2", "")
    ]
    assert not PIPELINE.plan(block)
    assert_right(block, x)
    calls.clear()
    assert_right(block, x)
    assert calls == ["default relu", "binary relu"]


@pytest.mark.parametrize(
    "case", ["gradient", "training", "contiguous", "autocast", "double", "hook", "norm"]
)
def test_such_a_call_runs_torchs_code(block, x, calls, case):
    seen = []
    if case == "training":
        block.train()
    elif case == "hook":
        block.bn2.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    elif case == "norm":
        block.bn1.train()
    x = x.contiguous() if case == "contiguous" else x
    block, x = (block.double(), x.double()) if case == "double" else (block, x)
    with (
        torch.set_grad_enabled(case == "gradient"),
        torch.autocast("cpu", enabled=case == "autocast"),
    ):
        want, got = plain(block)(x), block(x)
    torch.testing.assert_close(got, want, rtol=1e-2 if case == "autocast" else 1e-4, atol=1e-4)
    if case in ("hook", "norm"):
        assert all(type(each) is torch.Tensor for each in seen)
    else:  # the result of a contiguous input is in channels-last, as the weight is
        assert calls == (["binary relu"] if case == "contiguous" else [])
    if case == "gradient":
        got.sum().backward()
        assert block.conv1.weight.grad is not None


@torch.no_grad()
def test_changed_weights_are_seen(block, x):
    other = lively(Block())
    changes = (
        lambda: block.load_state_dict(other.state_dict()),
        lambda: block.load_state_dict(lively(Block()).state_dict(), assign=True),
        lambda: block.conv1.weight.mul_(2),
        lambda: block.conv2.weight.data.mul_(3),
        lambda: block.bn1.weight.data.neg_(),
        lambda: block.bn2.bias.data.add_(1),
        lambda: setattr(block.bn1, "eps", 0.5),
        lambda: setattr(block.conv1, "bias", nn.Parameter(torch.ones(8))),
        lambda: setattr(block.conv2, "padding", (2, 2)) or setattr(block.conv2, "dilation", (2, 2)),
        lambda: (block.bn2.train()(torch.randn(9, 8, 4, 4)), block.bn2.eval()),
    )
    before = assert_right(block, x)
    for change in changes:
        change()
        after = assert_right(block, x)
        assert not torch.equal(before, after)
        before = after


@torch.no_grad()
def test_modules_that_are_called_on_their_own_give_torchs_result(block, x):
    own = plain(block)
    y = block.conv1(x)
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y, own.conv1(x))
    torch.testing.assert_close(block.bn1(y), own.bn1(y))
    torch.testing.assert_close(block.act(y.clone()), own.act(y.clone()))


class Shared(Block):
    """Reads results in ways that change after it was prepared."""

    way = "as traced"

    def forward(self, x):
        y = self.conv1(x)
        if self.way == "norm left out":
            return self.act(y)
        if self.way == "read twice":
            return self.bn1(y) + y
        if self.way == "changed input":
            x.mul_(2)
        if self.way == "kept":
            self.kept = y
        return self.act(self.bn1(y))


@pytest.mark.parametrize("way", ["norm left out", "read twice", "kept"])
@pytest.mark.parametrize("inference", [False, True])
def test_another_way_through_forward_is_right_too(x, way, inference):
    model = PIPELINE.apply(lively(Shared()))
    model.way = way
    with torch.no_grad(), torch.inference_mode(inference):
        own = plain(model)
        torch.testing.assert_close(model(x), own(x), rtol=1e-4, atol=1e-5)
        if way == "kept":
            torch.testing.assert_close(model.kept + 0, own.kept)


@torch.no_grad()
def test_an_input_that_changes_before_its_result_is_read_is_an_error(x):
    model = PIPELINE.apply(lively(Shared()))
    model.way = "changed input"
    with pytest.raises(RuntimeError, match=r"fuse_inference\.undo"):
        model(x)
    model.way = "as traced"
    assert_right(model, x)


@torch.no_grad()
def test_a_module_that_is_used_twice_is_right(x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.conv = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
            self.bn, self.act = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.act(self.bn(self.conv(self.act(self.first(x)))))
            return self.act(self.conv(y)) + self.bn(y)

    assert_right(PIPELINE.apply(lively(Twice())), x)


def test_parameters_copies_and_undo(block, x):
    fresh = lively(Block())
    parameters, keys = dict(fresh.named_parameters()), [*fresh.state_dict()]
    PIPELINE.apply(fresh)
    assert all(each is parameters[name] for name, each in fresh.named_parameters())
    with torch.no_grad():
        want = fresh(x)
        buffer = io.BytesIO()
        torch.save(fresh, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for copied in (copy.deepcopy(fresh), pickle.loads(pickle.dumps(fresh)), loaded):
            assert [*copied.state_dict()] == keys
            assert torch.equal(copied(x), want)
            copied.conv1.weight.zero_()
            assert_right(copied, x)
        assert torch.equal(fresh(x), want)
    fuse_inference.undo(fresh)
    assert (type(fresh.conv1), type(fresh.conv2)) == (nn.Conv2d, nn.Conv2d)
    assert not fresh._forward_hooks
    assert vars(fresh.conv1).keys() == vars(nn.Conv2d(1, 1, 1)).keys()


def test_other_steps_beside_it(x, calls):
    steps = {"fuse_conv_bn": {}, "repair_layout": {"force": True}, "input_format": {"attach": True}}
    for order in (steps | STEPS, STEPS | steps):
        model = lively(Block(40))
        right = model(x).detach()
        Pipeline.from_config(order).apply(model)
        with torch.no_grad():
            torch.testing.assert_close(model(x), right, rtol=1e-4, atol=1e-4)
            calls.clear()
            model(x.contiguous())
        assert len(calls) == 2
        Pipeline.from_config(order).undo(model)
        assert type(model.conv1) is nn.Conv2d


def test_without_an_operator_the_step_stands_aside(monkeypatch):
    monkeypatch.delitem(fused._OPERATORS, "_convolution_pointwise.binary")
    plan = PIPELINE.plan(lively(Block()))
    assert not any(action.step == "fuse_inference" for action in plan.actions)
    assert any("_convolution_pointwise.binary" in str(warning) for warning in plan.warnings)


def test_what_cannot_be_traced_is_named(x):
    class Branching(Block):
        def forward(self, x):
            return super().forward(x) if x.sum() < torch.inf else x

    for model, named in ((Branching(), ["conv1, conv2"]), (Block(), [])):
        plan = PIPELINE.plan(model.eval())
        warned = [p.wrong for p in plan.warnings if p.where == "steps.fuse_inference"]
        assert [text.partition("(")[2].partition(")")[0] for text in warned] == named


def test_the_first_line_says_what_was_fused():
    model = lively(nn.Sequential(Block(), nn.Conv2d(8, 8, 1)))
    plan = PIPELINE.plan(model)
    text = converted_text(audit(PIPELINE.apply(model), plan=plan))
    assert "2 run with their batch norm, ReLU and addition" in text
    assert "1 runs on packed weights alone" in text


def test_verify_passes_and_finds_a_fault(block, x, monkeypatch):
    reference = plain(block)
    assert verify(reference, block, (x,), mode="eval", seconds=20).status == "pass"
    run = fused._OPERATORS["_convolution_pointwise.binary"]
    monkeypatch.setitem(
        fused._OPERATORS, "_convolution_pointwise.binary", lambda *args: run(*args) * 1.01
    )
    assert verify(reference, block, (x,), mode="eval", seconds=20).status == "fail"


def test_a_slower_or_failing_trial_leaves_the_model_alone(monkeypatch, x):
    step = fuse_inference.FuseInference()
    for least, option in ((1e9, "include"), (0.0, "exclude")):
        monkeypatch.setattr(fuse_inference, "_LEAST", least)
        model = lively(Block()).to(memory_format=torch.channels_last)
        chosen, notes = step.for_example(model, call_of((x,)), backward=False, amp="none")
        assert getattr(chosen, option) == ("*",)
        assert "MiB" in notes[0]
        assert type(model.conv1) is nn.Conv2d
        pipeline = Pipeline([chosen])
        pipeline.apply(model, strict=False)
        assert (type(model.conv1) is nn.Conv2d) == (option == "exclude")
        assert not pipeline.plan(model)
    chosen, notes = step.for_example(model, call_of((x[:, :2],)), backward=False, amp="none")
    assert chosen == step
    assert "cannot be run" in notes[0]


def test_prepare_offers_it_in_evaluation_on_a_cpu(monkeypatch, x, calls):
    monkeypatch.setattr(fuse_inference, "_LEAST", 1e9)
    model = prepare.prepare(lively(Block()), x, memory_format="channels_last")
    with torch.no_grad():
        model(x)
    assert "binary relu" in calls
    trained = prepare.prepare(Block(), x, memory_format="channels_last")
    assert type(trained.conv1) is nn.Conv2d


@pytest.mark.heavy
def test_a_compiler_sees_torchs_code(block, x):
    with torch.no_grad():
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), plain(block)(x), rtol=1e-4, atol=1e-5)
        traced = torch.jit.trace(block, x)
        torch.testing.assert_close(traced(x), plain(block)(x), rtol=1e-4, atol=1e-5)
        exported = torch.export.export(block, (x,)).module()
        torch.testing.assert_close(exported(x), plain(block)(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_linear_layer_runs_on_a_packed_weight(calls, dtype):
    net = nn.Sequential(nn.Linear(256, 300), nn.GELU(), nn.Linear(300, 7)).to(dtype).eval()
    x = torch.randn(3, 5, 512, dtype=dtype)[..., ::2]
    right = copy.deepcopy(net).double()(x.double())
    model = Pipeline.from_config({"fuse_inference": {}}).apply(copy.deepcopy(net))
    assert [type(model[0]), type(model[2])] == [fused.FusedLinear, nn.Linear]
    errors = [(each(x).double() - right).abs().max() for each in (net, model)]
    assert errors[1] <= 1.5 * errors[0] + torch.finfo(dtype).eps
    assert calls == ["default none"]
    assert model(x[0, 0]).equal(net(x[0, 0]))  # without a batch torch computes
    other = copy.deepcopy(net)
    other[0].reset_parameters()
    changes = (
        lambda: model.load_state_dict(other.state_dict()),
        lambda: model[0].weight.data.mul_(2),
        lambda: model[0].bias.add_(1),
        lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(300, 256, dtype=dtype))),
    )
    for change in changes:
        before = model(x)
        change()
        assert not model(x).equal(before)
        torch.testing.assert_close(model(x), plain(model)(x), rtol=2e-2, atol=2e-2)
    calls.clear()
    with torch.enable_grad():
        model(x).sum().backward()
    assert not calls
    assert model[0].weight.grad is not None
    assert verify(plain(model), model, (x,), mode="eval", seconds=20).status == "pass"


@torch.no_grad()
def test_an_expanded_weight_is_smaller_than_it_looks(calls):
    net = nn.Sequential(nn.Linear(128, 1024)).eval()
    net[0].weight = nn.Parameter(torch.randn(1, 128).expand(1024, 128))
    x = torch.randn(2, 128)
    want = net(x)
    Pipeline.from_config({"fuse_inference": {}}).apply(net)
    torch.testing.assert_close(net(x), want)
    assert calls
