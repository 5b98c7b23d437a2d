"""Test copies of models: modes, hooks, computed weights, and networks of libraries."""

import pytest
import torch
from torch import nn

from prepare.core.model.module_tree import CopyError, deep_copy


def test_gradient_hooks_and_attributes_of_parameters_are_copied():
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * 2)
    model.weight.lr_scale = 0.1
    duplicate = deep_copy(model)
    for each in (model, duplicate):
        each(torch.ones(1, 2)).sum().backward()
    assert torch.equal(duplicate.weight.grad, model.weight.grad)
    assert duplicate.weight.lr_scale == 0.1


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
