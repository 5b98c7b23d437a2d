"""The code that a call of a module runs: its class's, torch's, or a function on the instance."""

import functools
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from prepare.core.model.forward_code import forward_code
from prepare.steps.repairs import find_repair

KEEPING_NORM = find_repair("group_norm").swaps[nn.GroupNorm]
KEEPING_CONV = find_repair("conv2d").swaps[nn.Conv2d]


class Casting(nn.GroupNorm):
    def forward(self, input):  # noqa: A002
        return super().forward(input.float())


class Grandchild(Casting):
    def forward(self, input):  # noqa: A002
        return super(Grandchild, self).forward(input)  # noqa: UP008


class ByName(nn.GroupNorm):
    def forward(self, input):  # noqa: A002
        return nn.GroupNorm.forward(self, input)


class Called(nn.GroupNorm):
    def __call__(self, input):  # noqa: A002
        return super().__call__(input.float())


class Borrowed(nn.GroupNorm):
    forward = nn.GroupNorm.forward


class Functional(nn.GroupNorm):
    def forward(self, input):  # noqa: A002
        return F.group_norm(input, 1) if self.training else super().forward(input)


class Other(nn.GroupNorm):
    def forward(self, input):  # noqa: A002
        return input / input.std()


class Standardised(nn.Conv2d):
    def forward(self, input):  # noqa: A002
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


class Scaled(nn.Conv2d):
    def _conv_forward(self, input, weight, bias):  # noqa: A002
        return super()._conv_forward(input, weight * 2, bias)


def passing(function):
    return lambda *args: function(*args)


class Undecorated(nn.GroupNorm):
    @passing
    def forward(self, input):  # noqa: A002
        return super().forward(input)


class Helped(nn.GroupNorm):
    def forward(self, input):  # noqa: A002
        return self.run(input)

    def run(self, input):  # noqa: A002
        return super().forward(input)


def norm(cls=nn.GroupNorm):
    return cls(1, 2)


def parametrized():
    module = norm()
    parametrize.register_parametrization(module, "weight", nn.Softplus())
    return module


@pytest.mark.parametrize(
    ("module", "repaired", "alone", "runs_torchs"),
    [
        (norm(), True, True, True),
        (parametrized(), True, True, True),
        (norm(Casting), True, False, True),
        (norm(Grandchild), True, False, True),
        (norm(Called), True, False, True),
        (norm(Undecorated), True, False, True),
        (norm(Helped), True, False, True),
        (norm(ByName), False, False, True),
        (norm(Borrowed), False, False, True),
        (norm(Functional), False, False, True),
        (norm(Other), False, False, False),
        (nn.Conv2d(1, 1, 1), True, True, True),
        (Standardised(1, 1, 1), True, False, True),
        (Scaled(1, 1, 1), True, False, True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_the_code_of_a_class(module, repaired, alone, runs_torchs):
    code = forward_code(module)
    keeping = KEEPING_CONV if isinstance(module, nn.Conv2d) else KEEPING_NORM
    assert code.torchs is keeping.__mro__[1]
    assert (code.runs(keeping), code.alone, code.runs_torchs) == (repaired, alone, runs_torchs)
    assert code.replaced_by == ""


class Registry:
    """Keeps the old forward, as the hooks of diffusers."""

    def __init__(self, forward):
        self.forward = forward

    def hook(self):
        def hooked(*args):
            return self.forward(*args)

        return hooked


def hooked_by_attribute(module, *args):
    return module._old_forward(*args)


def with_attribute(module):
    module._old_forward = module.forward
    return functools.update_wrapper(functools.partial(hooked_by_attribute, module), module.forward)


HANDING_ON = {
    "bound": lambda module: module.forward,
    "given": lambda module: functools.partial(lambda old, *args: old(*args), module.forward),
    "attribute": with_attribute,
    "registry": lambda module: Registry(module.forward).hook(),
    "twice": lambda module: Registry(with_attribute(module)).hook(),
    "compiled": lambda module: torch.compile(module.forward),
}


def fast(module, input):  # noqa: A002
    return F.conv2d(input, module.weight) + F.group_norm(input, 1)


@functools.wraps(nn.GroupNorm.forward)
def disguised(module, input):  # noqa: A002
    return input


REPLACING = {
    "other": lambda module: MethodType(fast, module),
    "disguised": lambda module: MethodType(disguised, module),
    "both": lambda module: functools.partial(
        lambda old, input: F.conv2d(input, module.weight) + F.layer_norm(old(input), (2,)),  # noqa: A006
        module.forward,
    ),
    "another's": lambda _: nn.Conv2d(1, 1, 1).forward,
}


@pytest.mark.parametrize("way", HANDING_ON)
def test_a_function_on_the_instance_that_runs_torchs(way):
    conv, module = nn.Conv2d(1, 1, 1), norm()
    for each in (conv, module):
        each.forward = HANDING_ON[way](each)
    # torch's forward, which the function holds, finds `_conv_forward` by the class, and runs group_norm itself.
    assert forward_code(conv).runs(KEEPING_CONV)
    assert not forward_code(module).runs(KEEPING_NORM)
    for each in (conv, module):
        assert forward_code(each).runs_torchs
        assert not forward_code(each).alone
        assert forward_code(each).replaced_by


@pytest.mark.parametrize("way", REPLACING)
def test_a_function_on_the_instance_that_runs_other_code(way):
    for module, keeping in ((nn.Conv2d(1, 1, 1), KEEPING_CONV), (norm(), KEEPING_NORM)):
        module.forward = REPLACING[way](module)
        code = forward_code(module)
        assert not code.runs(keeping)
        assert code.runs_torchs  # it may
        assert code.replaced_by


def test_a_function_on_the_instance_is_named_by_its_own_code():
    module = norm()
    module.forward = with_attribute(module)
    assert forward_code(module).replaced_by == f"{__name__}.hooked_by_attribute"
    assert module.forward.__name__ == "forward"


def test_an_inner_method_on_the_instance_runs_in_place_of_the_class():
    module = nn.Conv2d(1, 1, 1)
    module._conv_forward = lambda input, *_: input  # noqa: A006
    code = forward_code(module)
    assert not code.runs(KEEPING_CONV)
    assert not code.alone
    assert code.replaced_by.endswith("<lambda>")
