"""Parameters that share storage: tied, views of one buffer, expanded."""

import torch
from torch import nn

from awkward_checks import HALF, apply
from prepare.audit import audit
from prepare.pipeline import Pipeline
from small_nets import Tied, bits, clone, tensors


def test_tied_parameters_stay_tied_and_are_moved_once():
    model = Tied()
    apply(model)
    assert model.encoder.weight is model.decoder.weight
    assert model.encoder.weight.dtype is torch.float16


def two_over_one_storage():
    model = nn.ModuleDict({"a": nn.Conv2d(4, 4, 3), "b": nn.Conv2d(4, 4, 3)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


def test_two_parameters_over_one_storage_go_on_sharing_it():
    model = two_over_one_storage()
    first, second = model["a"].weight, model["b"].weight
    reference = clone(first.data).half().to(memory_format=torch.channels_last)
    apply(model)
    assert model["a"].weight is first
    assert model["b"].weight is second
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first, reference)
    assert first.stride() == second.stride() == reference.stride()
    rows = {row.path: row for row in audit(model).rows}
    assert rows["a.weight"].shared_with == ("b.weight",)


def test_an_exclusion_holds_for_every_parameter_over_one_storage():
    model = two_over_one_storage()
    plan = Pipeline.from_config({"conv2d_memory_format": {"exclude": ["b"]}}).plan(model)
    assert not plan
    assert [t.off for t in plan.tensors if t.module == "a" and t.tensor == "weight"] == [
        {"conv2d_memory_format": "exclude: b (as b.weight)"}
    ]


def flattened():
    """As flat optimizers and old distributed code do it: every weight a view of one buffer."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Linear(3, 3))
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    offset = 0
    for parameter in model.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    model.register_buffer("flat", flat)
    return model


def test_views_of_a_flat_buffer_are_cast_as_one_and_stay_views():
    model = flattened()
    reference = {name: tensor.detach().clone().half() for name, tensor in tensors(model).items()}
    apply(model, HALF)
    for name, tensor in tensors(model).items():
        assert bits(tensor) == bits(reference[name])
    model.flat.fill_(3)
    assert all((p == 3).all() for p in model.parameters())
