"""Modules as other people's code leaves them: whatever a call of one runs, a preparation gives its numbers."""

import copy
import types

import pytest
import torch
from torch import nn

from prepare.errors import PrepareError
from prepare.pipeline import Pipeline

KINDS = {
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), 2),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), 2),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), 2),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), 3),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(2), 3),
    "PReLU": (lambda: nn.PReLU(4), 2),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3, padding=1), 2),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3, padding=1), 3),
    "circular": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), 2),
    "patches": (lambda: nn.Conv3d(4, 4, 2, stride=2), 3),
}
STEPS = {
    "formats": {},
    "repairs": {"repair_layout": {}},
    "calls": {"repair_layout": {}, "keep_layout": {}},
    "rewrites": {"repair_layout": {}, "rewrite_conv": {"force": True}},
}
FORMATS = {"conv2d_memory_format": {}, "conv3d_memory_format": {}, "input_format": {"attach": True}}


def as_it_is(module):
    return module


def replaced(module):
    theirs = module.forward
    module.forward = types.MethodType(lambda self, x: theirs(x) * 2 + 1, module)
    return module


def wrapped(module):
    theirs = module.forward
    module.forward = lambda *args, **kwargs: theirs(*args, **kwargs)
    return module


def own_forward(module):
    cls = type(module)

    def forward(self, x):
        return cls.forward(self, x * 0.5) + x.mean()

    module.__class__ = type("Own", (cls,), {"forward": forward})
    return module


def torchs_forward(module):
    class Sub(type(module)):
        def forward(self, x):
            return super().forward(x)

    module.__class__ = Sub
    return module


def hooked(module):
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    module.register_forward_hook(lambda _, args, output: output * 3)
    return module


FORMS = (as_it_is, replaced, wrapped, own_forward, torchs_forward, hooked)


def numbers(model, x):
    """Return the outputs, and the gradients of the input and of every Parameter."""
    x = x.clone().requires_grad_()
    output = model(x)
    (
        output * torch.linspace(-1, 1, output.numel(), dtype=x.dtype).view(output.shape)
    ).sum().backward()
    found = {"output": output.detach(), "input": x.grad}
    return found | {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=[pytest.mark.slow] * (form not in (replaced, torchs_forward)))
        for form in FORMS
    ],
)
def test_a_module_in_any_form_gives_its_own_numbers(form, steps):
    compared = 0
    for name, (make, rank) in KINDS.items():
        conv = nn.Conv2d if rank == 2 else nn.Conv3d

        def build(conv=conv, make=make):
            torch.manual_seed(0)
            layers = conv(3, 4, 3, padding=1), form(make()), conv(4, 2, 1)
            return nn.Sequential(*layers).double().eval()

        model = build()
        # The closures of two forms hold the module of before.
        reference = build() if form in (wrapped, replaced) else copy.deepcopy(model)
        x = torch.randn(2, 3, *[8] * rank, dtype=torch.float64)
        wanted = numbers(reference, x)
        try:
            Pipeline.from_config(STEPS[steps] | FORMATS).apply(
                model, strict=False, known_issues="ignore"
            )
            found = numbers(model, x)
        except PrepareError as error:
            assert "1" in str(error) or name in str(error), error
            continue
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(
                found[key], value, msg=lambda text, at=(name, key): f"{at}: {text}"
            )
        compared += 1
    assert compared >= 8
