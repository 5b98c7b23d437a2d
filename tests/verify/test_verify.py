"""Test that a verification finds planted faults, passes clean preparations, and restores all state."""

import random

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from flow_nets import MORE, NETS
from paths import CONF
from prepare.core.forward.call import call_of
from prepare.core.forward.example_input import Example, build_example
from prepare.stages.verify import verify
from small_nets import build, facts
from verify_checks import FLAT, PIPELINES, check, checks_by_kind, flat_norm, prepared
from verify_faults import FAULTS, Net

# Not a clean preparation: NaN in the weight gradient of a depthwise ConvTranspose3d.
NOT_CLEAN = {("monai_mednext", "float32")}


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
    assert result.status == "cannot tell" or result.advice or "; take copy" in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(QUICK)))
def test_no_planted_fault_passes(name):
    assert planted(name).status != "pass"


def twice(module, args, _output):
    nn.BatchNorm2d.forward(module, args[0].detach())


RARE = {
    "no gradient of a depthwise bias": (lambda m: m[3].bias.requires_grad_(False), "3"),
    "statistics updated twice": (lambda m: m[1].register_forward_hook(twice), "1"),
}


@pytest.mark.parametrize("name", RARE)
def test_a_fault_that_few_numbers_show_is_found(name):
    last = nn.Conv2d(8, 8, 3, groups=8)
    reference = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), last)
    pipeline, model = prepared(reference, FLAT)
    RARE[name][0](model)
    result = verify(reference, model, torch.randn(2, 3, 12, 12), pipeline=pipeline, mode="train")
    assert (result.status, result.culprit) == ("fail", RARE[name][1])


WRONG_ON_CPU = {
    "silu": lambda: flat_norm(nn.SiLU()),
    "tanh": lambda: flat_norm(nn.Tanh(), channels=16, size=9),
    "gelu": lambda: flat_norm(nn.GELU(), affine=False),
    "two of them": lambda: flat_norm(nn.SiLU(), double=True, size=16),
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
    assert "the step repair_layout" in result.advice


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
    call = call_of(example).map(lambda tensor: tensor[:size] if tensor.dim() else tensor)
    batch = Example(call.args, call.kwargs)
    result = check(reference, PIPELINES[precision], batch, mode=mode, seconds=60.0)
    assert result.status != "fail", result


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
    verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert (state(reference), state(model)) == before
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (random.getstate(), numpy_state()) == drawn[1:]
    assert batch.grad is None
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
