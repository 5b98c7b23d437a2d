"""Subclasses of convolutions: the repair runs inside the user's own forward."""

import abc
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prepare.pipeline import Pipeline
from prepare.steps import keep_layout, repair_layout
from prepare.steps.keeping.calls import replaced_calls
from prepare.steps.repairs import find_repair
from repair_errors import errors, laid_out, limits, results
from repaired_modules import NAMES, is_canonical

CONV3D = find_repair("conv3d")


class Causal(nn.Conv3d):
    """Pads frames before the first, as the decoders of videos do."""

    def forward(self, x):
        return super().forward(F.pad(x, (0, 0, 0, 0, 2, 0)))


class Named(nn.Conv3d):
    """Calls torch's class by its name, in a comprehension."""

    def forward(self, x):
        return torch.cat([nn.Conv3d.forward(self, part) for part in x.split(4, 2)], 2)


class Grandchild(Causal):
    """Has no forward of its own."""


class Abstract(Causal, abc.ABC):
    """Has a metaclass of its own."""


class Upsampling(nn.ConvTranspose3d):
    """Scales what torch's class returns."""

    def forward(self, x):
        return 2 * super().forward(x)


class Functional(nn.Conv3d):
    """Runs the convolution itself."""

    def forward(self, x):
        return F.conv3d(x, self.weight, self.bias, self.stride, self.padding)


class OwnCall(nn.Conv3d):
    """Overrides what the repair overrides."""

    def _conv_forward(self, input, weight, bias):  # noqa: A002
        return F.conv3d(input, weight * 2, bias)


SUBCLASSES = {
    "causal": lambda: Causal(4, 8, 3, padding=(0, 1, 1)),
    "named": lambda: Named(4, 6, (1, 3, 3)),
    "grandchild": lambda: Grandchild(4, 6, 3),
    "product": lambda: Causal(4, 6, 1),
    "abstract": lambda: Abstract(4, 6, 3),
    "upsampling": lambda: Upsampling(4, 16, 2, 2),
}
UNREACHED = {"functional": Functional, "own call": OwnCall}
STEPS = {"repair_layout": {}, "conv3d_memory_format": {}}


def module_of(name):
    torch.manual_seed(0)
    return SUBCLASSES[name]()


def repaired(module):
    again = copy.deepcopy(module)
    CONV3D.repair(again, NAMES)
    return again


def video(batch=1):
    return laid_out(torch.randn(batch, 4, 8, 9, 7))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_keeps_the_layout_and_is_as_accurate(name, batch):
    module, x = module_of(name), video(batch)
    exact = results(module, x, torch.float64)
    actual = results(repaired(module), x, torch.float32)
    found, allowed = errors(actual, exact), limits(module, x, torch.float32, exact)
    assert all(error <= limit for error, limit in zip(found, allowed, strict=True))
    if name != "grandchild":  # whose pad gives another layout where the padding is that large
        assert is_canonical(repaired(module)(x))


@pytest.mark.parametrize("name", SUBCLASSES)
def test_a_subclass_stays_itself_and_can_be_undone(name):
    module = module_of(name)
    cls, held, called = type(module), vars(module).copy(), []
    module.register_forward_hook(lambda *_: called.append(1))
    assert CONV3D.ranks(module) == (5,)
    CONV3D.repair(module, NAMES)
    assert CONV3D.is_repaired(module)
    assert not CONV3D.fits(module)
    assert isinstance(module, cls)
    assert type(module).__name__ == f"Keeping{cls.__name__}"
    assert type(repaired(module_of(name))) is type(module)
    module(video())
    assert called == [1]
    CONV3D.undo(module)
    assert type(module) is cls
    assert vars(module) == held
    assert CONV3D.fits(module)


@pytest.mark.parametrize("first", [repair_layout, keep_layout])
def test_both_steps_act_in_any_order_and_are_undone_in_any_order(first):
    model = nn.Sequential(module_of("causal"))
    formats, both = {"conv3d_memory_format": {}}, [{"repair_layout": {}}, {"keep_layout": {}}]
    for step in both if first is repair_layout else both[::-1]:
        Pipeline.from_config(step | formats).apply(model, strict=False, known_issues="ignore")
    assert CONV3D.is_repaired(model[0])
    assert replaced_calls(model[0])
    assert is_canonical(model(video()))
    assert not Pipeline.from_config(both[0] | both[1]).plan(model, known_issues="ignore")
    second = keep_layout if first is repair_layout else repair_layout
    first.undo(model)
    assert CONV3D.is_repaired(model[0]) or replaced_calls(model[0])
    second.undo(model)
    assert type(model[0]) is Causal
    assert not replaced_calls(model[0])


@pytest.mark.parametrize("name", UNREACHED)
def test_a_subclass_that_cannot_be_reached_is_named(name):
    model = nn.Sequential(UNREACHED[name](4, 6, 3), UNREACHED[name](6, 6, 3)).eval()
    plan = Pipeline.from_config(STEPS).plan(model)
    assert not CONV3D.fits(model[0])
    assert [action for action in plan.actions if action.step == "repair_layout"] == []
    (warning,) = plan.warnings
    assert warning.where == f"{UNREACHED[name].__name__} (0 and 1 more)"
    assert "[conv3d_reference_cpu]" in warning.wrong
    half = Pipeline.from_config({**STEPS, "half": {"dtype": "bfloat16"}}).plan(model)
    assert "conv3d_reference_cpu" not in " ".join(map(str, half.warnings))
