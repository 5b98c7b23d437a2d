"""The repair of computed weights: weight_norm, spectral_norm and other parametrizations."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from prepare.audit import audit
from prepare.pipeline import Pipeline
from prepare.steps.repairs import find_repair
from repaired_modules import NAMES, is_canonical

COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "older weight_norm": lambda module: _older(nn.utils.weight_norm, module),
    "older spectral_norm": lambda module: _older(nn.utils.spectral_norm, module),
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.3),
    "pruned twice": lambda module: prune.random_unstructured(
        prune.l1_unstructured(module, "weight", 0.3), "weight", 0.2
    ),
}


SHAPES = {
    "2-d": lambda: nn.Conv2d(4, 6, 3),
    "1x1": lambda: nn.Conv2d(4, 6, 1),
    "3-d": lambda: nn.Conv3d(4, 6, 3),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
}


def _older(norm, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return norm(module)


def computed(name, shape):
    module = COMPUTED[name](SHAPES[shape]()).eval()
    return module, torch.randn(2, 4, *(5,) * (module.weight.dim() - 2))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_is_repaired_and_audited_as_converted(name, shape):
    module, x = computed(name, shape)
    before, keys = module(x), list(module.state_dict())
    rank = x.dim()
    pipeline = Pipeline.from_config(
        {"repair_layout": {"force": True}, f"conv{rank - 2}d_memory_format": {}}
    )
    model = nn.Sequential(module)
    plan = pipeline.plan(model)
    assert list(module.state_dict()) == keys
    assert not find_repair("computed_weight").is_repaired(module)
    pipeline.apply(model)
    report = audit(model, plan=plan)
    assert report.summary["convolutions"]["converted"] == 1
    assert report.summary["status"]["ineffective"] == 0
    assert list(module.state_dict()) == keys
    torch.testing.assert_close(module(x), before)
    assert is_canonical(module.weight)
    assert not pipeline.plan(model)


@pytest.mark.parametrize("name", COMPUTED)
def test_a_repaired_computed_weight_trains_as_before(name):
    module, x = (each.double() for each in computed(name, "2-d"))
    repair = find_repair("computed_weight")
    attributes, hooks = set(vars(module)), dict(module._forward_pre_hooks)
    modules = [type(each) for each in module.modules()]
    before = _gradients(module, x)
    repair.repair(module, NAMES)
    for new, old in zip(_gradients(module, x), before, strict=True):
        torch.testing.assert_close(new, old)
    repair.repair(module, NAMES)
    assert repair.is_repaired(module)
    assert not repair.fits(module)
    repair.undo(module)
    assert repair.fits(module)
    assert set(vars(module)) == attributes
    assert dict(module._forward_pre_hooks) == hooks
    assert [type(each) for each in module.modules()] == modules


def _gradients(module, x):
    return torch.autograd.grad(module(x).pow(2).sum(), list(module.parameters()))
