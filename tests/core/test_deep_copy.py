"""Test copies of models: modes, hooks, shared memory, computed weights, and networks of libraries."""

import copy

import pytest
import torch
from einops.layers import torch as einops
from torch import nn

from prepare.core.model.deep_copy import CopyError, deep_copy
from prepare.core.model.training_mode import may_read_mode
from prepare.stages.verify import verify

FLAT = {"spatial_dims": 2, "in_channels": 1}


def described(model):
    return {
        name: (type(m), m.training, len(m._forward_hooks), sorted(vars(m)))
        for name, m in model.named_modules()
    }


def test_gradient_hooks_and_attributes_of_parameters_are_copied():
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * 2)
    model.weight.lr_scale = 0.1
    duplicate = deep_copy(model)
    for each in (model, duplicate):
        each(torch.ones(1, 2)).sum().backward()
    assert torch.equal(duplicate.weight.grad, model.weight.grad)
    assert duplicate.weight.lr_scale == 0.1


def test_memory_that_a_parameter_shares_is_shared_in_the_copy():
    model = nn.Conv2d(2, 2, 1)
    model.flat = model.weight.data.view(-1)
    duplicate = deep_copy(model)
    duplicate.flat.fill_(7.0)
    assert duplicate.weight.eq(7.0).all()
    assert not model.weight.eq(7.0).any()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_of_the_old_weight_norm_is_copied():
    model = nn.utils.weight_norm(nn.Conv2d(2, 2, 1))
    model(torch.ones(1, 2, 3, 3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    duplicate = deep_copy(model)
    batch = torch.ones(1, 2, 3, 3)
    assert torch.equal(duplicate(batch), model(batch))
    assert duplicate.weight_v is not model.weight_v


@pytest.mark.parametrize("place", ["attribute", "hook", "default"])
def test_a_function_that_refers_to_the_model_is_not_copied(place):
    model = nn.Sequential(nn.Linear(2, 2))
    inner = model[0]
    if place == "attribute":
        model.scaled = lambda x: x * inner.weight.sum()
    elif place == "hook":
        model.register_forward_hook(lambda *_: inner.bias)
    else:
        model.scaled = lambda x, weight=inner.weight: x * weight
    with pytest.raises(CopyError, match="a function that refers to the model itself"):
        deep_copy(model)


def test_a_part_that_python_cannot_copy_is_named():
    model = nn.Identity()
    model.stream = (number for number in range(3))
    with pytest.raises(CopyError, match="generator"):
        deep_copy(model)


# --------------------------------------------------------------------------- modes that do not matter


class Looks(nn.Module):
    """Reads the mode of its child."""

    def __init__(self):
        super().__init__()
        self.child = nn.Identity()

    def forward(self, x):
        return x * 2 if self.child.training else x


def test_only_a_mode_that_code_reads_can_fail_the_flags():
    model = nn.Sequential(einops.Rearrange("b c h w -> b h w c"), nn.Dropout(), Looks())
    modules = dict(model.named_modules())
    found = {name for name in modules if may_read_mode(modules, name)}
    assert found == {"1", "2", "2.child"}


def test_a_deepcopy_of_einops_layers_passes_and_a_dropout_does_not():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), einops.Rearrange("b c h w -> b h w c"), nn.Dropout())
    reference = copy.deepcopy(model.eval())
    assert reference[1].training
    batch = torch.randn(1, 3, 4, 4)
    assert verify(reference, model, batch).status == "pass"
    model[2].train()
    result = verify(reference, model, batch)
    assert (result.status, result.culprit) == ("fail", "2")
    assert "the same mode" in result.advice
    assert "steps." not in result.advice
