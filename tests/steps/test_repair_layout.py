"""The step repair_layout: which modules it repairs, and the properties of every repair."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from prepare.pipeline import Pipeline
from prepare.steps import repairs
from small_nets import bits, facts

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
FLAT = {"conv2d_memory_format": {}, "repair_layout": {}}
DEEP = {"conv3d_memory_format": {}, "repair_layout": {}}

# One module of every class with a repair, and the shape of an input.
EXAMPLES = {
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(16, affine=True), (2, 16, 9, 10)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(16), (2, 16, 5, 6, 7)),
    "GroupNorm": (lambda: nn.GroupNorm(4, 16), (2, 16, 9, 10)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), (2, 16, 6, 6, 8)),
    "LPPool3d": (lambda: nn.LPPool3d(2, 2), (2, 16, 6, 6, 8)),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(2), (2, 16, 6, 6, 8)),
    "AdaptiveMaxPool3d": (lambda: nn.AdaptiveMaxPool3d(2), (2, 16, 6, 6, 8)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), (2, 16, 6, 8)),
    "CircularPad2d": (lambda: nn.CircularPad2d(1), (2, 16, 6, 8)),
    "CircularPad3d": (lambda: nn.CircularPad3d((1, 0, 2, 1, 1, 1)), (2, 16, 4, 6, 8)),
    "Softmax": (lambda: nn.Softmax(1), (2, 16, 6, 8)),
    "Softmin": (lambda: nn.Softmin(1), (2, 16, 6, 8)),
    "LogSoftmax": (lambda: nn.LogSoftmax(1), (2, 16, 6, 8)),
    "Softmax2d": (lambda: nn.Softmax2d(), (2, 16, 6, 8)),
    "Conv2d": (lambda: nn.Conv2d(128, 256, 3, padding=1), (2, 128, 4, 4)),
    "Conv3d": (lambda: nn.Conv3d(4, 16, 3), (1, 4, 8, 8, 8)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 16, 2, stride=2), (1, 4, 6, 6, 6)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv2d(4, 16, 3)), (2, 4, 8, 8)),
    "weight_norm of old": (lambda: _old_weight_norm(nn.Conv2d(4, 16, 3)), (2, 4, 8, 8)),
}


def _old_weight_norm(module):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return weight_norm(module)


def example(name):
    """Return a module, its repair, and an input."""
    torch.manual_seed(0)
    make, shape = EXAMPLES[name]
    module = make()
    candidates = [
        repair
        for each in repairs.all_repairs()
        if (repair := repairs.find_repair(each)).fits(module)
    ]
    kind = "computed_weight" if name.startswith("weight_norm") else None
    (repair,) = [repair for repair in candidates if kind in (None, repair.name)]
    return module, repair, torch.randn(shape)


def fixed(name):
    """Return the same module, repaired; torch cannot copy a module with the legacy weight_norm."""
    module, repair, _ = example(name)
    repair.repair(module, {4: "channels_last", 5: "channels_last_3d"})
    return module


def channels_last(x):
    return x.to(memory_format=FORMATS[x.dim()])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_repair_fits_once_and_undo_leaves_no_trace(name):
    module, repair, _ = example(name)
    before, kind = facts(module), type(module)
    assert not repair.is_repaired(module)
    repair.repair(module, {4: "channels_last", 5: "channels_last_3d"})
    assert repair.is_repaired(module)
    assert not repair.fits(module)
    repair.undo(module)
    assert not repair.is_repaired(module)
    assert type(module) is kind
    assert facts(module) == before


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_repair_keeps_every_tensor_key_and_hook(name):
    module, repair, x = example(name)
    held = {
        key: (id(t), bits(t), t.stride(), t._version)
        for key, t in module.state_dict(keep_vars=True).items()
    }
    parameters = [id(p) for p in module.parameters()]
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    repair.repair(module, {4: "channels_last", 5: "channels_last_3d"})
    module(channels_last(x))
    assert calls == [1]
    assert [id(p) for p in module.parameters()] == parameters
    after = module.state_dict(keep_vars=True)
    assert {key: (id(t), bits(t), t.stride(), t._version) for key, t in after.items()} == held


# torch's own softmax needs its output for its backward.
CHANGED_IN_PLACE = [name for name in EXAMPLES if "oftm" not in name]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", CHANGED_IN_PLACE)
def test_outputs_of_a_repaired_module_can_be_changed_in_place(name, large, monkeypatch):
    # As the activations of most networks do it: LeakyReLU(inplace=True).
    if large:  # norms use other kernels for large inputs
        monkeypatch.setattr("prepare.steps.repairs._norm_autograd._MIN_ELEMENTS", 0)
    module, _, x = example(name)
    gradients = []
    for each_module, value in ((fixed(name), channels_last(x)), (module, x)):
        value = value.detach().requires_grad_()
        nn.functional.leaky_relu_(each_module(value), 0.1).square().sum().backward()
        gradients.append([value.grad, *(p.grad for p in each_module.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", EXAMPLES)
def test_contiguous_and_unbatched_inputs_give_the_same_as_before(name):
    module, _, x = example(name)
    torch.testing.assert_close(fixed(name)(x), module(x), rtol=1e-5, atol=1e-5)
    if name != "GroupNorm":  # that does not accept an input without a batch
        torch.testing.assert_close(fixed(name)(x[0]), module(x[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_repaired_module_is_copied_pickled_and_compiled(name):
    _, repair, x = example(name)
    actual, x = fixed(name), channels_last(x)
    copies = []
    if name != "weight_norm of old":
        copies.append(copy.deepcopy(actual))
    if not name.startswith("weight_norm"):
        copies.append(pickle.loads(pickle.dumps(actual)))
    for again in copies:
        assert repair.is_repaired(again)
        assert bits(again(x)) == bits(actual(x))
    torch._dynamo.reset()
    compiled = torch.compile(actual, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), actual(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith("weight_norm")])
def test_a_users_own_subclass_is_not_repaired(name):
    module, repair, _ = example(name)
    module.__class__ = type("Own", (type(module),), {"forward": lambda self, x: x})
    assert not repair.fits(module)
    assert not repair.is_repaired(module)


def network(rank=4, norm=None):
    flat = rank == 4
    conv = nn.Conv2d if flat else nn.Conv3d
    norm = norm or (nn.InstanceNorm2d if flat else nn.InstanceNorm3d)(8, affine=True)
    return nn.Sequential(conv(3, 8, 3, padding=1), norm, nn.SiLU(), conv(8, 8, 3, padding=1))


def kinds(model):
    return [type(module).__name__ for module in model]


def test_only_ranks_in_channels_last_in_the_pipeline_are_repaired():
    model = nn.Sequential(nn.InstanceNorm2d(8), nn.InstanceNorm3d(8), *network(), *network(5))
    Pipeline.from_config(FLAT).apply(model)
    assert kinds(model)[:2] == ["KeepingInstanceNorm2d", "InstanceNorm3d"]
    assert kinds(model)[3] == "KeepingInstanceNorm2d"
    assert kinds(model)[7] == "InstanceNorm3d"


def test_a_contiguous_pipeline_repairs_nothing_unless_forced():
    asked = {"conv2d_memory_format": {"memory_format": "contiguous"}, "repair_layout": {}}
    model = network()
    Pipeline.from_config(asked).apply(model)
    assert kinds(model)[1] == "InstanceNorm2d"
    Pipeline.from_config({**asked, "repair_layout": {"force": True}}).apply(model)
    assert kinds(model)[1] == "KeepingInstanceNorm2d"


def test_only_known_issues_of_the_pipelines_device_are_repaired():
    model = nn.Sequential(*network(), nn.GroupNorm(2, 8))
    on_mps = Pipeline.from_config({"device": {"device": "mps"}, **FLAT}).plan(model).actions
    on_cpu = Pipeline.from_config(FLAT).plan(model).actions
    assert [action.modules for action in on_mps] == [("1",)]
    assert [action.modules for action in on_cpu] == [("1", "4")]


def test_an_issue_fixed_in_this_torch_is_not_repaired(monkeypatch):
    monkeypatch.setattr("prepare.core.model.known_issues.standing", lambda device: [])
    plan = Pipeline.from_config(FLAT).plan(network(), known_issues="ignore")
    assert not plan.actions
    forced = {**FLAT, "repair_layout": {"force": True}}
    assert Pipeline.from_config(forced).plan(network(), known_issues="ignore").actions
