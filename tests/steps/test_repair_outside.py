"""Repaired modules are torch's to the outside: how they are called, what they return, and who else changes them."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from prepare.errors import KnownIssueError
from prepare.pipeline import Pipeline
from prepare.steps import repair_layout
from prepare.steps.repairs import find_repair
from test_repair_layout import EXAMPLES, FLAT, channels_last, example, fixed, kinds, network

FORMATTED = {**FLAT, "input_format": {}}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", EXAMPLES)
def test_outputs_are_no_views(name, n):
    x, module = channels_last(example(name)[2][:1].repeat_interleave(n, 0)), fixed(name)
    y = module(x.requires_grad_())
    assert not y._is_view()
    y.detach_()
    with torch.no_grad():
        frozen = module(x)
    assert not frozen._is_view()
    frozen += torch.ones(1, requires_grad=True)
    assert frozen.requires_grad
    assert frozen.stride() == y.stride()


# ---- classes


class Alias(nn.InstanceNorm2d):
    """Another name."""


class Scaling(nn.InstanceNorm2d):
    def forward(self, input):  # noqa: A002
        return 2 * super().forward(input)


class Inner(nn.InstanceNorm2d):
    def _apply_instance_norm(self, input):  # noqa: A002
        return 2 * super()._apply_instance_norm(input)


class Functional(nn.InstanceNorm2d):
    def forward(self, input):  # noqa: A002
        return nn.functional.instance_norm(input, weight=self.weight, bias=self.bias)


class Double(nn.Module):
    """Counts its calls."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return 2 * weight


def parametrized():
    norm = nn.InstanceNorm2d(8, affine=True)
    parametrize.register_parametrization(norm, "weight", Double())
    return norm


NORMS = {
    "alias": lambda: Alias(8, affine=True),
    "scaling": lambda: Scaling(8, affine=True),
    "inner": lambda: Inner(8, affine=True),
    "parametrized": parametrized,
}


def gradients(model, x):
    model(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def trained(norm):
    """Return a network with this norm, and the gradients of a contiguous copy at batch 1."""
    torch.manual_seed(0)
    model, x = network(norm=norm), torch.randn(1, 3, 16, 16)
    right = gradients(model, x)
    model.zero_grad()
    return model, x, right


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_runs_torchs_code_is_named_and_repaired(name):
    model, x, right = trained(NORMS[name]())
    before = type(model[1])
    with pytest.raises(KnownIssueError, match=rf"{before.__name__} \(1\).*add the step repair"):
        Pipeline.from_config({"conv2d_memory_format": {}}).apply(model)
    pipeline = Pipeline.from_config(FORMATTED)
    pipeline.apply(model)
    assert find_repair("instance_norm").mends(model[1])
    torch.testing.assert_close(gradients(model, pipeline.format(x)), right, rtol=1e-4, atol=1e-5)
    assert pipeline.check(model) == []
    repair_layout.undo(model)
    assert not find_repair("instance_norm").is_repaired(model[1])
    assert type(model[1]).__name__ == before.__name__
    model(x)


def test_a_norm_with_a_forward_of_its_own_stays_an_error():
    model = network(norm=Functional(8))
    with pytest.raises(KnownIssueError, match=r"Functional \(1\).*cannot repair it: own forward"):
        Pipeline.from_config(FLAT).apply(model)
    assert kinds(model)[1] == "Functional"


# ---- a forward on the instance


def by_accelerate(module):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.ModelHook())


def by_diffusers(module):
    hooks = pytest.importorskip("diffusers.hooks")
    hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(hooks.ModelHook(), "a")


def by_partial(module):
    module.forward = functools.partial(lambda forward, *args: forward(*args), module.forward)


HOOKS = [by_accelerate, by_diffusers, by_partial]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_reaches_the_repair_trains_right(hook):
    model, x, right = trained(nn.InstanceNorm2d(8, affine=True))
    for module in model:
        hook(module)
    pipeline = Pipeline.from_config(FORMATTED)
    pipeline.apply(model)
    torch.testing.assert_close(gradients(model, pipeline.format(x)), right, rtol=1e-4, atol=1e-5)
    repair_layout.undo(model)
    model(pipeline.format(x))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_does_not_is_an_error_with_its_name(hook):
    model = network(norm=nn.GroupNorm(2, 8))
    hook(model[1])
    where = rf"GroupNorm \(1\).*cannot repair it: its forward was replaced by {hook.__name__[3:]}|lambda"
    with pytest.raises(KnownIssueError, match=where) as raised:
        Pipeline.from_config(FLAT).apply(model)
    assert "prepare the" in str(raised.value)
    plan = Pipeline.from_config(FLAT).plan(model.eval())
    assert any("its forward" in str(warning) for warning in plan.warnings)
    assert plan.training_errors
    assert not [action for action in plan.actions if action.step == "repair_layout"]


@pytest.mark.parametrize("kind", [nn.GroupNorm, nn.InstanceNorm2d])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_after_the_repair_run_it_and_outlive_its_undo(hook, kind):
    model, x, right = trained(kind(2, 8) if kind is nn.GroupNorm else kind(8))
    pipeline = Pipeline.from_config(FORMATTED)
    pipeline.apply(model)
    hook(model[1])
    assert pipeline.check(model) == []
    assert not pipeline.plan(model).errors
    torch.testing.assert_close(gradients(model, pipeline.format(x)), right, rtol=1e-4, atol=1e-5)
    repair_layout.undo(model)
    model(x)
    assert pipeline.check(model)
    pipeline.apply(model)
    assert pipeline.check(model) == []


# ---- other tools
