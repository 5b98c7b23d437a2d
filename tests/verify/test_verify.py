"""Test that a verification finds planted faults, passes clean preparations, and restores all state."""

import copy
import itertools
import json
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flow_nets import MORE, NETS
from paths import CONF
from prepare.core.forward.call import call_of
from prepare.core.forward.example_input import Example, build_example
from prepare.errors import RefusedError, VerificationError
from prepare.pipeline import Pipeline
from prepare.report.sentences import verify_sentence
from prepare.report.terminal.verify import show_verify
from prepare.verify import Check, Lost, Verification, verify
from prepare.verify.check_model import check_model
from prepare.verify.compare_case import RESULT_FIELDS
from prepare.verify.execution import single_run
from prepare.verify.execution.budget import Budget, Cost, estimate
from prepare.verify.execution.determinism import DeterministicMode, training_flags
from prepare.verify.inputs import resized, shifted
from prepare.verify.tolerance import compare
from small_nets import build, facts
from verify_faults import FAULTS, Net

FLAT = {"conv2d_memory_format": {}, "input_format": {}}
LAST = {
    "conv2d_memory_format": {},
    "conv3d_memory_format": {},
    "repair_layout": {},
    "input_format": {},
}
PIPELINES = {"float32": LAST, "bfloat16": {**LAST, "half": {"dtype": "bfloat16"}}}
# Not a clean preparation: NaN in the weight gradient of a depthwise ConvTranspose3d.
NOT_CLEAN = {("monai_mednext", "float32")}


def prepared(reference, steps, **options):
    pipeline = Pipeline.from_config(steps)
    model = copy.deepcopy(reference)
    pipeline.apply(model, strict=False, known_issues="ignore", **options)
    return pipeline, model


def check(reference, steps, batch, **options):
    pipeline, model = prepared(reference, steps)
    return verify(reference, model, batch, pipeline=pipeline, **options)


def estimated(model, batch):
    return estimate(model, call_of(batch), training_flags(model, "eval"))


def checks_by_kind(result):
    return {check.what: check for check in result.checks}


# --------------------------------------------------------------------------------- planted faults


def planted(name, steps=FLAT):
    """Verify a clean preparation into which one fault was planted afterwards."""
    torch.manual_seed(0)
    reference = Net().train()
    pipeline, model = prepared(reference, steps)
    FAULTS[name](model)
    return verify(reference, model, torch.randn(2, 3, 16, 16), pipeline=pipeline, mode="train")


QUICK = sorted(FAULTS)[::7]


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_does_not_pass(name):
    result = planted(name)
    assert result.status != "pass"
    assert result.reason
    assert result.status == "cannot tell" or result.advice


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(QUICK)))
def test_no_planted_fault_passes(name):
    assert planted(name).status != "pass"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_no_planted_fault_passes_without_a_layout_step(name):
    if name != "contiguous weight":  # not a fault without a layout step
        assert planted(name, {"device": {"device": "cpu"}}).status != "pass"


def test_there_are_at_least_sixty_faults():
    assert len(FAULTS) >= 60


# ------------------------------------------------------------------------- wrong gradients, on CPU


def flat_norm(act, *, channels=8, affine=True, size=12, double=False):
    layers = [nn.Conv2d(3, channels, 3), nn.InstanceNorm2d(channels, affine=affine), act]
    if double:
        layers += [nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels), act]
    return nn.Sequential(*layers, nn.Conv2d(channels, 4, 3)), torch.randn(1, 3, size, size)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.InstanceNorm2d(6)
        self.second, self.last = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.norm(self.second(x)).tanh())


WRONG_ON_CPU = {
    "silu": lambda: flat_norm(nn.SiLU()),
    "tanh": lambda: flat_norm(nn.Tanh(), channels=16, size=9),
    "gelu": lambda: flat_norm(nn.GELU(), affine=False),
    "two of them": lambda: flat_norm(nn.SiLU(), double=True, size=16),
    "residual": lambda: (Residual(), torch.randn(1, 3, 10, 14)),
    "wide": lambda: flat_norm(nn.GELU(), channels=32, size=20),
}


@pytest.mark.parametrize(
    "steps", [FLAT, {"conv2d_memory_format": {}}], ids=["formatted", "weights"]
)
@pytest.mark.parametrize("name", WRONG_ON_CPU)
def test_wrong_gradients_of_a_channels_last_instance_norm_are_found(name, steps):
    reference, batch = WRONG_ON_CPU[name]()
    result = check(reference, steps, batch, mode="train")
    checks = checks_by_kind(result)
    assert checks["outputs"].status == "pass"
    assert (result.status, checks["parameter gradients"].status) == ("fail", "fail")
    assert "norm" in result.culprit or isinstance(
        reference.get_submodule(result.culprit), nn.InstanceNorm2d
    )
    assert "+steps.repair_layout={}" in result.advice


def test_wrong_gradients_in_mode_eval_are_reported_but_do_not_fail():
    reference, batch = flat_norm(nn.SiLU())
    result = check(reference, FLAT, batch)
    assert (result.status, checks_by_kind(result)["parameter gradients"].status) == (
        "pass",
        "wrong",
    )
    assert "gradients" in result.reason


def test_without_gradients_no_backward_runs_and_outputs_still_count(monkeypatch):
    reference, batch = flat_norm(nn.SiLU())
    pipeline, model = prepared(reference, FLAT)
    monkeypatch.setattr(single_run, "_backward", lambda *_: pytest.fail("it ran backward"))
    result = verify(reference, model, batch, pipeline=pipeline, gradients=False)
    assert result.status == "pass"
    assert {"outputs", "buffers"} <= {check.what for check in result.checks}
    assert not any("gradient" in check.what for check in result.checks)
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    assert verify(reference, model, batch, pipeline=pipeline, gradients=False).status == "fail"
    with pytest.raises(RefusedError, match="mode 'train' requires them"):
        verify(reference, model, batch, mode="train", gradients=False)


def test_verifications_that_share_exact_runs_compute_them_once(monkeypatch):
    reference, batch = flat_norm(nn.SiLU())
    pipeline, model = prepared(reference, FLAT)
    exact_runs, dtypes, run_model = {}, [], single_run.run_model

    def recording(*args, **options):
        dtypes.append(options.get("dtype"))
        return run_model(*args, **options)

    monkeypatch.setattr(single_run, "run_model", recording)
    options = {"pipeline": pipeline, "exact_runs": exact_runs}
    first, second = (check_model(reference, model, batch, gradients=False, **options) for _ in "ab")
    assert dtypes.count(torch.float64) == 1
    assert [check.error for check in first.checks] == [check.error for check in second.checks]
    third = check_model(reference, model, batch, **options)
    assert dtypes.count(torch.float64) > 1
    assert any("gradient" in check.what for check in third.checks)


def test_full_finds_gradients_that_are_wrong_for_one_sample_only():
    reference, _ = flat_norm(nn.SiLU())
    batch = torch.randn(2, 3, 12, 12)
    assert check(reference, FLAT, batch, mode="train").status == "pass"
    assert check(reference, FLAT, batch, mode="train", level="full").status == "fail"


def test_full_finds_a_group_norm_that_is_wrong_at_a_large_mean():
    reference = nn.Sequential(nn.GroupNorm(4, 16), nn.Conv2d(16, 4, 3))
    batch = torch.randn(2, 16, 32, 32)
    assert check(reference, FLAT, batch).status == "pass"
    result = check(reference, FLAT, batch, level="full")
    assert (result.status, result.culprit) == ("fail", "0")
    assert {c.inputs for c in result.checks if c.status == "fail"} == {"mean 100 deviations"}


# ------------------------------------------------------------------------------ clean preparations


def normed(norm, rank, act):
    conv = nn.Conv2d if rank == 2 else nn.Conv3d
    return nn.Sequential(
        conv(3, 8, 3, padding=1), norm, act, conv(8, 8, 1), nn.ReLU(), conv(8, 2, 3)
    )


SMALL = {
    "batch norm": lambda: (normed(nn.BatchNorm2d(8), 2, nn.SiLU()), (2, 3, 12, 12)),
    "instance norm": lambda: (normed(nn.InstanceNorm2d(8), 2, nn.SiLU()), (1, 3, 12, 12)),
    "group norm": lambda: (normed(nn.GroupNorm(2, 8), 2, nn.GELU()), (1, 3, 12, 12)),
    "batch norm 3-d": lambda: (normed(nn.BatchNorm3d(8), 3, nn.ReLU()), (2, 3, 6, 6, 6)),
    "instance norm 3-d": lambda: (normed(nn.InstanceNorm3d(8, affine=True), 3, nn.LeakyReLU()), (1, 3, 6, 6, 6)),
    "everything": lambda: (Net(), (2, 3, 16, 16)),
}  # fmt: skip


@pytest.mark.parametrize("precision", PIPELINES)
@pytest.mark.parametrize("name", SMALL)
def test_a_clean_preparation_of_a_small_network_passes(name, precision):
    model, shape = SMALL[name]()
    result = check(model, PIPELINES[precision], torch.randn(shape), mode="train")
    assert (result.status, result.reason) == ("pass", "")
    assert checks_by_kind(result)["parameter gradients"].compared == len(list(model.parameters()))


def raw(name):
    """Build a network and its example input, without converting them."""
    if name in MORE:
        return MORE[name][0](), Example(tuple(torch.randn(shape) for shape in MORE[name][1:]))
    config = OmegaConf.load(CONF / f"model/{name}.yaml").input
    return build(name), build_example(OmegaConf.to_container(config))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "size"), [("train", 2), ("eval", 1), ("eval", 2)])
@pytest.mark.parametrize("precision", PIPELINES)
@pytest.mark.parametrize("name", NETS)
def test_no_clean_preparation_fails(name, precision, mode, size):
    if (name, precision) in NOT_CLEAN:
        pytest.skip("torch computes wrong gradients there")
    reference, example = raw(name)
    call = resized(call_of(example), size)
    batch = Example(call.args, call.kwargs)
    result = check(reference, PIPELINES[precision], batch, mode=mode, seconds=60.0)
    assert result.status != "fail", result


# ----------------------------------------------------------------------- random numbers, cannot tell


def stochastic_depth(x):
    """Drop samples at random, as MONAI's EfficientNet does."""
    drawn = torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
    return x / 0.8 * torch.floor(0.8 + drawn)


FIXED = {
    "rand": stochastic_depth,
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli of a tensor": lambda x: x * torch.sigmoid(x).bernoulli(),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x)),
    "a mask": lambda x: x * torch.empty_like(x, dtype=torch.bool).bernoulli_(0.5),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1.0, to=3.0),
    "normal_": lambda x: x + torch.empty_like(x).normal_(mean=1.0, std=0.5),
    "exponential_": lambda x: x - torch.empty_like(x).exponential_(2.0).log(),
}


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.draw = draw

    def forward(self, x):
        return self.last(self.draw(self.first(x)))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("draw", FIXED)
def test_both_models_draw_the_same_random_numbers(draw, mode):
    result = check(Draws(FIXED[draw]), FLAT, torch.randn(2, 3, 8, 8), mode=mode)
    assert (result.status, result.reference) == ("pass", "float64"), result.reason


@pytest.mark.parametrize("precision", PIPELINES)
def test_random_numbers_are_the_same_in_every_precision(precision):
    model = Draws(lambda x: x * torch.rand_like(x))
    result = check(model, PIPELINES[precision], torch.randn(2, 3, 8, 8), mode="train")
    assert result.status == "pass", result.reason


class Checkpointed(Draws):
    """Draws again in backward, in a checkpointed segment; in a segment of a segment if `nested`."""

    def __init__(self, draw, *, reentrant, nested=False):
        super().__init__(draw)
        self.options, self.nested = {"use_reentrant": reentrant}, nested

    def forward(self, x):
        def inner(x):
            return self.draw(self.first(x))

        def outer(x):
            return self.draw(checkpoint(inner, x, **self.options)) * self.draw(x).mean()

        return self.last(checkpoint(outer if self.nested else inner, x, **self.options))


@pytest.mark.parametrize("precision", PIPELINES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "draw", [lambda x: x * torch.rand_like(x), functional.dropout], ids=["numbers", "dropout"]
)
def test_a_recomputed_checkpoint_draws_the_same_numbers(draw, reentrant, nested, precision):
    model = Checkpointed(draw, reentrant=reentrant, nested=nested)
    result = check(model, PIPELINES[precision], torch.randn(2, 3, 8, 8), mode="train")
    assert result.status == "pass", result.reason


class Reversed(torch.autograd.Function):
    """Runs its forward again in backward, and calls `backward(y, dy)`, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, weight, keeps):
        ctx.save_for_backward(x, weight)
        ctx.keeps = keeps
        return functional.conv2d(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            y = functional.conv2d(x, weight)
        torch.autograd.backward(y, gradient, retain_graph=ctx.keeps)
        return x.grad, weight.grad, None


@pytest.mark.parametrize("keeps", [False, True])
def test_a_backward_inside_a_backward_works(keeps):
    class Reversible(nn.Conv2d):
        def forward(self, x):
            return Reversed.apply(x, self.weight, keeps)

    result = check(Reversible(3, 4, 3, bias=False), FLAT, torch.randn(2, 3, 8, 8), mode="train")
    assert result.status == "pass", result.reason


def test_numbers_repeat_if_torchs_generator_is_reset():
    with DeterministicMode():
        state = torch.get_rng_state()
        once, other = torch.rand(8), torch.rand(8)
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(8), once)
        assert not torch.equal(once, other)


def test_a_fault_is_found_despite_random_numbers():
    model, batch = Draws(FIXED["randn_like"]), torch.randn(2, 3, 8, 8)
    pipeline, changed = prepared(model, FLAT)
    with torch.no_grad():
        changed.last.weight[0, 0, 0, 0] += 0.1
    assert verify(model, changed, batch, pipeline=pipeline).status == "fail"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_fixed_numbers_keep_their_distribution_in_dtype_and_format(dtype, memory_format):
    given = torch.zeros((4, 16, 32, 32), dtype=dtype).to(memory_format=memory_format)
    with DeterministicMode():
        uniform, normal = torch.rand_like(given), torch.randn_like(given)
        ones = torch.empty_like(given).bernoulli_(0.25)
        spread = torch.empty_like(given).uniform_(2.0, 4.0)
    with DeterministicMode():
        flat = torch.rand(given.shape, dtype=torch.float64)
    assert uniform.is_contiguous(memory_format=memory_format)
    assert torch.equal(uniform, flat.clamp(max=1 - torch.finfo(dtype).eps / 2).to(dtype))
    assert uniform.max() < 1
    assert (uniform.double().mean(), spread.double().mean()) == (
        pytest.approx(0.5, abs=0.01),
        pytest.approx(3.0, abs=0.02),
    )
    assert (normal.double().mean(), normal.double().std(), ones.double().mean()) == (
        pytest.approx(0.0, abs=0.02),
        pytest.approx(1.0, abs=0.02),
        pytest.approx(0.25, abs=0.01),
    )


OWN = torch.Generator()
NOT_FIXED = {
    "a generator of its own": lambda x: x + torch.randn(x.shape, generator=OWN, dtype=x.dtype),
    "Python's numbers": lambda x: x * random.random(),
    "multinomial": lambda x: x * (1 + torch.multinomial(torch.ones(1000), 1)),
}


@pytest.mark.parametrize("draw", NOT_FIXED)
def test_random_numbers_that_cannot_be_fixed_are_cannot_tell(draw):
    result = check(Draws(NOT_FIXED[draw]), FLAT, torch.randn(2, 3, 8, 8))
    assert result.status == "cannot tell"
    assert "random numbers that cannot be fixed" in result.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reference_that_is_not_finite_is_cannot_tell(value):
    model = nn.Conv2d(3, 4, 3)
    nn.init.constant_(model.bias, value)
    assert check(model, FLAT, torch.randn(1, 3, 8, 8)).status == "cannot tell"


def test_outputs_without_a_tensor_are_cannot_tell():
    class Says(nn.Conv2d):
        def forward(self, x):
            return "nothing"

    assert check(Says(3, 4, 3), FLAT, torch.randn(1, 3, 8, 8)).status == "cannot tell"


def test_losses_of_a_cast_are_counted_and_an_overflow_fails():
    model = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        model.weight[0, 0, 0, :2] = torch.tensor([1e5, -1e6])
        model.bias[0] = 1e-9
    model.register_buffer("position", torch.arange(4096.0))
    # Not applied: `apply` refuses what overflows.
    pipeline = Pipeline.from_config({"half": {"dtype": "float16"}, "input_format": {}})
    cast = copy.deepcopy(model).half()
    result = verify(model, cast, torch.randn(1, 3, 8, 8), pipeline=pipeline)
    lost = {loss.tensor: loss for loss in result.lost}
    assert result.status == "fail"
    assert (result.lost[0].tensor, lost["weight"].overflowed) == ("weight", 2)
    assert (lost["bias"].flushed, lost["position"].rounded) == (1, 1024)
    assert "2 of 108 numbers of weight overflow float16" in result.reason
    assert "steps.half.dtype=bfloat16" in result.advice


def test_bfloat16_is_allowed_the_error_of_bfloat16_and_no_more():
    model, batch = Net(), torch.randn(2, 3, 16, 16)
    pipeline, changed = prepared(model, PIPELINES["bfloat16"])
    assert verify(model, changed, batch, pipeline=pipeline).status == "pass"
    changed.up.register_forward_hook(lambda module, args, out: out * 1.3)
    result = verify(model, changed, batch, pipeline=pipeline)
    assert result.status == "fail"
    assert "steps.half.keep=[norms," in result.advice


class Shifted(nn.Module):
    """Adds a constant: 16-bit numbers far from zero have large errors; a second module subtracts it."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x + self.by


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_missing_16_bit_kernel_still_allows_the_rounding_error(mode):
    reference = nn.Sequential(
        nn.Conv3d(2, 4, 3), nn.AvgPool3d(2), Shifted(64.0), Shifted(-64.0), nn.Conv3d(4, 2, 1)
    ).train(mode == "train")
    batch = torch.randn(1, 2, 8, 8, 8)
    with pytest.raises(NotImplementedError, match="BFloat16"):
        copy.deepcopy(reference).bfloat16()(batch.bfloat16())
    pipeline, model = prepared(reference, PIPELINES["bfloat16"])
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert result.status == "pass", result.reason
    outputs = checks_by_kind(result)["outputs"]
    assert outputs.error > 4 * torch.finfo(torch.bfloat16).eps * 2**0.5  # more than the floor
    model[2].by = 70.0
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert result.status == "fail"


def test_advice_blames_torch_if_the_baseline_is_wrong_too():
    class Wrong(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) * (1e6 if x.dtype == torch.bfloat16 else 1.0)

    result = check(Wrong(3, 4, 3), PIPELINES["bfloat16"], torch.randn(1, 3, 8, 8))
    assert result.status == "fail"
    assert "torch itself is wrong in Wrong in bfloat16" in result.advice


def test_an_impossible_view_is_named_with_its_remedy():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.conv(x).view(len(x), -1)

    result = check(Views(), FLAT, torch.randn(2, 3, 8, 8))
    assert (result.status, checks_by_kind(result)["forward"].status) == ("fail", "fail")
    assert ".view" in result.reason
    assert ".reshape" in result.advice


def test_a_lost_weight_layout_fails_only_with_a_pipeline():
    pipeline, model = prepared(Net(), FLAT)
    reference = copy.deepcopy(model)
    model.stem.weight.data = model.stem.weight.data.contiguous()
    batch = torch.randn(2, 3, 16, 16)
    assert verify(reference, model, batch).status == "pass"
    result = verify(reference, model, batch, pipeline=pipeline)
    assert (result.status, result.culprit) == ("fail", "stem.weight")
    assert "apply the pipeline again" in result.advice


def test_a_reference_that_raises_is_cannot_tell_or_skipped():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12))
    assert check(model, FLAT, torch.randn(1, 3, 2, 2), mode="train").status == "cannot tell"
    result = check(model, FLAT, torch.randn(2, 3, 2, 2), mode="train", level="full")
    assert result.status == "pass"
    assert [c.batch for c in result.checks if c.what == "forward" and c.status == "skipped"] == [
        1,
        1,
    ]


class Thinning(nn.Module):
    def __init__(self, part=0.0):
        super().__init__()
        self.linear, self.part = nn.Linear(64, 64), part

    def forward(self, batch):
        return nn.functional.dropout(self.linear(batch), self.part, training=self.training)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_compiled_model_is_compared_without_and_with_compiler(mode):
    reference = Net()
    _, model = prepared(reference, FLAT)
    model.compile(backend="aot_eager")
    result = verify(
        reference.train(mode == "train"),
        model.train(mode == "train"),
        torch.randn(2, 3, 16, 16),
        mode=mode,
    )
    assert (result.status, result.reason) == ("pass", "")
    compiled = [check.what for check in result.checks if check.inputs == "compiled"]
    assert compiled == (["outputs"] if mode == "eval" else list(RESULT_FIELDS))


@pytest.mark.parametrize("attach", [True, False])
def test_a_compiled_model_gets_user_inputs_and_is_not_recompiled(attach):
    graphs, example = [], torch.randn(1, 3, 16, 16)

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    reference = Net().eval()
    steps = {"conv2d_memory_format": {}, "input_format": {"attach": attach}}
    pipeline, model = prepared(reference, steps)
    model.compile(backend=counting)
    with torch.no_grad():
        model(example if attach else pipeline.format(example))
    compiled = len(graphs)
    result = verify(reference, model, example, pipeline=pipeline, gradients=False)
    assert (result.status, len(graphs)) == ("pass", compiled)
    assert compiled


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_compiler_that_computes_something_else_is_blamed(mode):
    def wrong(graph, inputs):
        return lambda *given: [2 * output for output in graph.forward(*given)]

    reference = Thinning()
    _, model = prepared(reference, {})
    model.compile(backend=wrong)
    result = verify(reference, model, torch.randn(1, 64), mode=mode)
    assert result.status == "fail"
    assert result.reason.startswith(f"outputs ({mode} mode, compiled, batch 1): output is off by")
    assert "the compiler computes something else" in result.advice


def test_a_compiler_that_fails_fails_the_verification():
    def broken(graph, inputs):
        raise RuntimeError("no kernel")

    reference = Thinning()
    _, model = prepared(reference, {})
    model.compile(backend=broken)
    result = verify(reference, model, torch.randn(1, 64))
    assert result.status == "fail"
    assert "no kernel" in result.reason


@pytest.mark.parametrize(
    ("reference", "mode"),
    [(Thinning(0.5), "train"), (Draws(FIXED["randn_like"]), "eval")],
    ids=["dropout", "noise"],
)
def test_random_numbers_of_a_compiled_model_are_cannot_tell(reference, mode):
    reference.train(mode == "train")
    _, model = prepared(reference, {})
    model.compile(backend="aot_eager")
    batch = torch.randn(4, 64) if mode == "train" else torch.randn(2, 3, 8, 8)
    result = verify(reference, model, batch, mode=mode)
    assert result.status == "cannot tell"
    assert "dropout and random numbers cannot be fixed" in result.reason


# ---------------------------------------------------------------------------- state is restored


def numpy_state():
    return np.random.get_state()[1].tolist()  # noqa: NPY002


def state(model):
    modules = {name: (m.training, dict(vars(m)).keys()) for name, m in model.named_modules()}
    grads = {name: (id(p.grad), p.requires_grad) for name, p in model.named_parameters()}
    return facts(model), modules, grads, getattr(model.drop, "p", None)


@pytest.mark.parametrize(
    "fault", [None, "a little more of one output", "it raises", "sign of one bias gradient"]
)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_both_models_and_all_random_states_are_restored(mode, fault):
    reference = Net()
    pipeline, model = prepared(reference, FLAT)
    if fault:
        FAULTS[fault](model)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.train()
    reference.bn.eval()
    batch = torch.randn(2, 3, 16, 16, requires_grad=True)
    before = state(reference), state(model)
    drawn = torch.get_rng_state(), random.getstate(), numpy_state()
    level = "short" if fault else "full"
    verify(reference, model, batch, pipeline=pipeline, mode=mode, level=level)
    assert (state(reference), state(model)) == before
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), numpy_state()) == drawn[1:]
    assert batch.grad is None
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))


def test_an_optimizer_that_steps_in_a_hook_does_not_step():
    reference = nn.Conv2d(3, 4, 3)
    _, model = prepared(reference, FLAT)
    steps = []
    model.weight.register_post_accumulate_grad_hook(lambda p: steps.append(p))
    assert verify(reference, model, torch.randn(1, 3, 8, 8), mode="train").status == "pass"
    assert not steps


# ------------------------------------------------------------------------------------- arguments


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.embedding = nn.Conv2d(3, 4, 3), nn.Embedding(7, 4)

    def forward(self, x, ids, *, scale=1.0, masks=()):
        return self.conv(x) * scale + self.embedding(ids).mean(1).view(-1, 4, 1, 1) + sum(masks)


def test_a_batch_may_be_a_tensor_a_tuple_a_mapping_or_an_example():
    x, ids = torch.randn(2, 3, 8, 8), torch.tensor([[1, 2], [3, 4]])
    named = {"x": x, "ids": ids, "scale": 2.0, "masks": [torch.rand(1)]}
    for batch in ((x, ids), named, Example((x,), {"ids": ids})):
        for precision in PIPELINES:
            assert check(Many(), PIPELINES[precision], batch, mode="train").status == "pass"
    assert check(nn.Conv2d(3, 4, 3), FLAT, x).status == "pass"


def test_a_batch_can_be_resized_and_shifted():
    call = call_of({"x": torch.randn(3, 4), "ids": torch.arange(3), "one": torch.tensor(1.0)})
    assert [resized(call, size).batch for size in (1, 2, 3, 7)] == [1, 2, 3, 7]
    grown = resized(call, 5).kwargs
    assert torch.equal(grown["x"][:3], call.kwargs["x"])
    assert not torch.equal(grown["x"][3:], call.kwargs["x"][:2])
    assert grown["ids"].tolist() == [0, 1, 2, 0, 1]
    moved = shifted(call, 100.0).kwargs
    assert 50 < float(moved["x"].mean()) < 200
    assert torch.equal(moved["ids"], call.kwargs["ids"])


def test_dropout_is_off_in_modules_functions_and_attention():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.drop = nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            x = nn.functional.dropout(self.drop(self.conv(x)), 0.5, self.training)
            x = x.flatten(2).transpose(1, 2)
            return self.attention(x, x, x)[0]

    assert check(Drops(), FLAT, torch.randn(2, 3, 8, 8), mode="train").status == "pass"


def test_a_model_that_casts_to_float32_is_compared_in_float32():
    class Casts(nn.Conv2d):
        def forward(self, x):
            return super().forward(x.float())

    result = check(Casts(3, 4, 3), FLAT, torch.randn(2, 3, 8, 8), mode="train")
    assert (result.status, result.reference) == ("pass", "float32")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"memory": 1000}, "the limit is 1000 bytes"), ({"seconds": 1e-9}, "s are left")],
)
def test_a_run_that_does_not_fit_is_cannot_tell_with_the_reason(limit, reason):
    result = check(Net(), FLAT, torch.randn(2, 3, 16, 16), **limit)
    assert result.status == "cannot tell"
    assert reason in result.reason


def test_the_reference_runs_in_float32_if_float64_does_not_fit():
    model, batch = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 32, 32)
    cost = estimated(model, batch)
    memory = cost.bytes(torch.float64, backward=True) - 1
    result = check(model, FLAT, batch, memory=memory)
    assert (result.status, result.reference) == ("pass", "float32")
    assert check(model, FLAT, batch).reference == "float64"


def test_a_float64_convolution_is_estimated_with_its_unfolding():
    model, batch = nn.Conv3d(4, 8, 3, padding=1), torch.randn(2, 4, 16, 16, 16)
    cost = estimated(model, batch)
    assert cost.unfolded == {False: [27 * batch.numel()]}
    assert cost.operations == 2 * 27 * 4 * 8 * 2 * 16**3
    assert cost.bytes(torch.float64, backward=False) > 27 * batch.numel() * 8
    assert cost.bytes(torch.bfloat16, backward=False) < 27 * batch.numel() * 2


def test_the_estimate_runs_the_model_if_shapes_are_not_enough():
    class Looks(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) < 1e9 else x

    assert estimated(Looks(3, 4, 3), torch.randn(1, 3, 8, 8)).operations > 0


def test_the_estimate_needs_only_shapes_and_gives_no_warning():
    kinds = []

    def draw(x):
        warnings.warn("a model's own", stacklevel=1)
        kinds.append(type(x))
        return x * torch.rand_like(x)

    assert estimated(Draws(draw), torch.randn(2, 3, 8, 8)).operations > 0
    assert [kind.__name__ for kind in kinds] == ["FakeTensor"]


def test_a_budget_says_why_a_run_does_not_fit():
    budget = Budget(10.0, 2**20)
    large = Cost(elements=2**20)
    assert "4.0 MiB, the limit is 1.0 MiB" in budget.refuses(large, torch.float32, backward=False)
    assert "a run in float64 takes about" in budget.refuses(Cost(operations=10**12), torch.float64)
    assert budget.refuses(Cost(elements=10), torch.float32) == ""


@pytest.mark.parametrize(
    ("took", "left", "ending"), [(1.0, 1.5, ""), (4.0, 3.0, "about 4 s, but 3 of 7 s are left")]
)
def test_the_time_of_a_run_scales_the_next_estimate(monkeypatch, took, left, ending):
    now = [0.0]
    monkeypatch.setattr("prepare.verify.execution.budget.time.monotonic", lambda: now[0])
    budget, cost = Budget(took + left, 2**30), Cost(operations=6 * 10**9)  # by the estimate 2 s
    with budget.timing(cost, torch.float64, backward=False):
        now[0] += took
    refusal = budget.refuses(cost, torch.float64, backward=False)
    assert refusal.endswith(ending)
    assert bool(refusal) == bool(ending)
    assert budget.refuses(cost, torch.float32, backward=False) == ""


def test_a_model_is_not_verified_against_itself():
    model = Pipeline.from_config({"half": {}}).apply(Net())
    with pytest.raises(
        RefusedError, match=r"is the same object as the reference; .*copy\.deepcopy\(model\)"
    ):
        verify(model, model, torch.randn(1, 3, 8, 8))


def test_unknown_levels_and_modes_are_refused():
    for option in ({"level": "long"}, {"mode": "training"}):
        with pytest.raises(RefusedError, match="is not a (level|mode); "):
            verify(Net(), Net(), torch.randn(1, 3, 8, 8), **option)
    with pytest.raises(RefusedError, match="run one forward first"):
        verify(nn.LazyConv2d(3, 3), nn.LazyConv2d(3, 3), torch.randn(1, 3, 8, 8))


# ------------------------------------------------------------------------------------- tolerances


def exceeding(exact, baseline, actual, **options):
    """Compare plain lists of numbers; return which tensors exceed their tolerance."""
    baseline = [{name: torch.tensor(value) for name, value in run.items()} for run in baseline]
    exact, actual = ({n: torch.tensor(v) for n, v in run.items()} for run in (exact, actual))
    result = compare(exact, baseline, actual, dtype=torch.float32, depth=1, **options)
    return {difference.name: difference.exceeds for difference in result}


def test_a_bias_whose_true_gradient_is_zero_is_measured_by_its_weight():
    exact = {"conv.weight": [1.0, 2.0], "conv.bias": [0.0]}
    actual = {"conv.weight": [1.0, 2.0], "conv.bias": [1e-6]}
    assert exceeding(exact, [], actual)["conv.bias"]
    assert not exceeding(exact, [], actual, gradients=True, by_module=True)["conv.bias"]


def test_a_gradient_that_is_missing_is_the_same_as_zeros():
    zeros, ones = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    options = {"dtype": torch.float32, "depth": 1, "gradients": True}
    assert not compare(zeros, [], {"a": None}, **options)[0].exceeds
    assert compare(ones, [], {"a": None}, **options)[0].exceeds


class Backwards(TorchDispatchMode):
    """Records the input width of each bfloat16 convolution whose weight gradient is computed."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default and args[2].dtype == torch.bfloat16:
            gradient, given, transposed = args[0], args[1], args[7]
            self.sizes.append((gradient if transposed else given).shape[-1])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [nn.Conv3d, nn.ConvTranspose3d])
@pytest.mark.parametrize(
    "repair", [{"repair_layout": {"force": True}}, {}], ids=["repaired", "not"]
)
def test_a_backward_that_may_overwrite_memory_is_not_run(kind, repair):
    torch.manual_seed(0)
    reference = nn.Sequential(kind(8, 8, 3, padding=1))
    steps = {"half": {"dtype": "bfloat16"}, "input_format": {}, **repair}
    pipeline, model = prepared(reference, steps)
    with Backwards() as run:
        mode = "train" if repair else "eval"
        result = verify(reference, model, torch.randn(2, 8, 2, 2, 2), pipeline=pipeline, mode=mode)
    assert result.status == "pass"
    assert min(run.sizes) > 2  # padded with zeros to the size of the kernel
    checks = {check.what: check for check in result.checks if "gradients" in check.what}
    assert {check.status for check in checks.values()} == {"pass" if repair else "skipped"}
    if not repair:
        assert "overwrite memory in the backward of 0," in checks["parameter gradients"].note
        assert type(reference[0]) is type(model[0]) is kind


def test_noise_of_the_baseline_is_allowed_but_garbage_is_not():
    exact, baseline = {"a": [1.0]}, [{"a": [1.01]}]
    assert not exceeding(exact, baseline, {"a": [1.05]})["a"]
    assert exceeding(exact, baseline, {"a": [1.07]})["a"]
    for garbage in (1e30, float("nan")):
        assert exceeding(exact, [{"a": [garbage]}], {"a": [1e20]})["a"]
        assert not exceeding(exact, [{"a": [garbage]}], {"a": [1.0]})["a"]


def test_gradients_that_are_all_noise_are_cannot_tell():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(20):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    reference = nn.Sequential(*layers)
    pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "input_format": {}})
    model = pipeline.apply(copy.deepcopy(reference))
    result = verify(reference, model, torch.randn(1, 3, 8, 8), pipeline=pipeline, mode="train")
    checks = {check.what: check for check in result.checks}
    assert result.status == "cannot tell"
    assert checks["outputs"].status == "pass"
    for what in ("input gradients", "parameter gradients"):
        assert checks[what].status == "cannot tell"
        assert checks[what].note == (
            "the unprepared model in bfloat16 is itself too far off; with trained weights it may not be"
        )


class SpoilsOnce(nn.Sequential):
    """Scales its weight's gradient in the first channels-last run only."""

    def __init__(self, factor):
        super().__init__(nn.Conv2d(3, 8, 3))
        self.factor, self.runs = factor, itertools.count()

    def forward(self, x):
        out = super().forward(x)
        if self[0].weight.is_contiguous(memory_format=torch.channels_last) and not next(self.runs):
            # The same outputs, but other gradients.
            out = out.detach() + self.factor * (out - out.detach())
        return out


@pytest.mark.parametrize(("factor", "status"), [(1e20, "fail"), (1.1, "pass")], ids=["garbage", "noise"])  # fmt: skip
def test_garbage_in_one_run_is_not_excused_by_a_right_one(factor, status):
    torch.manual_seed(0)
    result = check(SpoilsOnce(factor), FLAT, torch.randn(1, 3, 8, 8), mode="train")
    assert result.status == status


# --------------------------------------------------------------------------------- record, report


def test_a_verification_round_trips_through_its_file(tmp_path):
    reference, batch = flat_norm(nn.SiLU())
    result = check(reference, PIPELINES["bfloat16"] | {"repair_layout": None}, batch, mode="train")
    result.save(tmp_path / "verify.json")
    assert Verification.load(tmp_path / "verify.json") == result
    data = json.loads((tmp_path / "verify.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.verify", 1)


@pytest.mark.parametrize(
    "change",
    [{"format": "prepare.flow"}, {"version": 2}, {"status": "fine"}, {"checks": [{}]}, {"lost": 3}, {"more": 1}],
)  # fmt: skip
def test_a_file_that_is_not_a_verification_is_refused(tmp_path, change):
    path = tmp_path / "verify.json"
    check(nn.Conv2d(3, 4, 3), FLAT, torch.randn(1, 3, 8, 8)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VerificationError, match=r"verify\.json"):
        Verification.load(path)


def test_the_record_and_the_report_load_without_torch():
    code = "import sys, prepare.report.terminal.verify, prepare.verify.records; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def shown(result, capsys):
    show_verify(result, "out/1")
    return capsys.readouterr().out


def test_the_terminal_shows_the_verdict_the_culprit_and_the_advice(capsys):
    reference, batch = flat_norm(nn.SiLU())
    result = check(reference, FLAT, batch, mode="train")
    text = shown(result, capsys)
    assert text.startswith("verify (short): fail: ")
    assert "the first difference is in 1" in text
    assert "+steps.repair_layout={}" in text
    assert "details are in out/1" in text
    assert "parameter gradients" in text


def test_the_terminal_reports_wrong_checks_of_a_pass(capsys):
    reference, batch = flat_norm(nn.SiLU())
    assert "pass: 7 checks against float64; wrong, but not a failure in mode eval: " in shown(
        check(reference, FLAT, batch), capsys
    )


def test_names_and_losses_are_shown_on_one_line_each():
    lost = Lost(
        tensor="a\nb",
        before="float32",
        after="float16",
        elements=9,
        overflowed=1,
        flushed=2,
        rounded=0,
    )
    check = Check(what="outputs", status="fail", worst="[red]\n", error=0.5, allowed=0.1)
    result = Verification(
        status="fail", reason="x\ny", level="short", mode="eval", reference="float64", checks=(check,),
        lost=(lost,), culprit="c\nd", advice="e", seconds=1.0,
    )  # fmt: skip
    assert verify_sentence(result) == "fail: x\\ny"
    show_verify(result)
