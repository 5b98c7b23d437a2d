"""Test that a module which keeps state is compared from the same state, and raises no false alarm."""

import warnings
from itertools import count

import pytest
import torch
from torch import nn

from guarded import ALL
from prepare.core.forward.unchanged import unchanged, without_gradients
from prepare.errors import GuardError, GuardWarning
from prepare.pipeline import Pipeline
from stateful_nets import STATEFUL

FLAT = {"conv2d_memory_format": {}, "input_format": {}}
# State that no copy of a module holds: it is left out with a remark. Another module is drift.
APART = {"OfTheClass", "ParameterInPlace", "ParameterMoved", "Hooked", "Draws"}
RAISES = {"Replaced", "InPlaceInput"}


@pytest.fixture(autouse=True)
def _flags_of_this_process():
    with unchanged(nn.Identity()):
        yield


def flat(*modules, training=False):
    torch.manual_seed(0)
    pipeline = Pipeline.from_config(FLAT)
    return pipeline, pipeline.apply(nn.Sequential(*modules).train(training), known_issues="ignore")


def batch(size):
    values = torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size)
    return values.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", sorted(set(STATEFUL) - RAISES - {"Flags"}))
def test_a_module_that_keeps_state_raises_no_false_alarm(name, training):
    pipeline, model = flat(nn.Conv2d(3, 4, 1), STATEFUL[name](), training=training)
    with pipeline.guard(model, every=1, share=ALL) as guard:
        for size in (6, 6, 8, 8, 6):
            with torch.set_grad_enabled(training):
                output = model(batch(size))
            if output.requires_grad:
                output.square().mean().backward()
            guard()
        assert guard.looks > 0
    assert guard.differences == []
    assert set(guard.left_out) <= ({"1"} if name in APART else set())


def test_a_fault_of_a_module_that_keeps_state_is_found():
    pipeline, model = flat(nn.Conv2d(3, 4, 1), STATEFUL["KeyValues"]())
    with torch.no_grad(), pipeline.guard(model) as guard:
        model(batch(6))
        forward = model[1].forward
        model[1].forward = lambda x: forward(x) + 0.1
        with pytest.raises(GuardError, match="^1: its outputs are off"):
            model(batch(8))
    assert len(guard.differences) == 1


class Global(nn.Module):
    """Counts its calls outside of the module."""

    calls = count()

    def forward(self, x):
        return x + next(Global.calls)


def test_state_outside_of_a_module_raises_no_false_alarm():
    pipeline, model = flat(nn.Conv2d(3, 4, 1), Global(), STATEFUL["OfTheClass"]())
    with torch.no_grad(), pipeline.guard(model) as guard:
        for size in (6, 8, 6):
            model(batch(size))
    assert guard.differences == []
    assert "it keeps state outside of the module" in guard.left_out["2"]


class Forces(nn.Module):
    """Differentiates in its forward, which raises in no_grad mode."""

    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(3, 4, 3), nn.SiLU()

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.act(self.conv(x)).sum(), x)[0]


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_that_differentiates_is_looked_at_in_advance(training):
    pipeline, model = flat(Forces(), training=training)
    guard = pipeline.guard(model)
    guard.look(batch(8))
    assert guard.looks >= 2
    assert (guard._steps, guard.differences) == (0, [])
    code = model[0].act.forward
    model[0].act.forward = lambda x: code(x) * 1.1
    with pytest.raises(GuardError, match=r"0\.act: its outputs are off"):
        guard.look(batch(10))


def test_a_difference_with_gradients_alone_is_not_swallowed():
    pipeline, model = flat(Forces())
    code = model[0].act.forward
    guard = pipeline.guard(model)
    model[0].act.forward = lambda x: code(x) * (1.1 if torch.is_grad_enabled() else 1)
    with pytest.raises(GuardError, match=r"0\.act: its outputs are off"):
        guard.look(batch(8))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("error", [GuardError("", "wrong"), GuardWarning("wrong")])
def test_no_second_run_hides_an_error_of_a_guard(error, first):
    runs = []

    def run():
        runs.append(torch.is_grad_enabled())
        if first or runs[-1]:
            raise error
        raise RuntimeError("needs a gradient")

    with pytest.raises(type(error)):
        without_gradients(run)
    assert runs == ([False] if first else [False, True])


def test_a_hook_inside_a_composite_module_does_not_run_again():
    calls = []
    inner = nn.Conv2d(4, 4, 1)
    inner.register_forward_hook(lambda *_: calls.append("inner"))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.utils.parametrizations.weight_norm(inner)

        def forward(self, x):
            return self.inner(x) + x

    pipeline, model = flat(nn.Conv2d(3, 4, 1), Outer())
    with warnings.catch_warnings(), torch.no_grad(), pipeline.guard(model) as guard:
        model(batch(6))
        assert (calls, guard.left_out, guard.differences) == (["inner"], {}, [])
        assert guard.looks == 3
