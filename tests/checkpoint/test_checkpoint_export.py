"""Resumed optimizers, the manifest beside a file, and models exported as torch's own."""

import copy
import json

import pytest
import torch
from torch import nn

from checkpoint_nets import Awkward, pipeline, same_state, small, state_of
from prepare.checkpoint import export, load, save
from prepare.errors import CheckpointError, RefusedError
from prepare.pipeline import Pipeline


def test_a_resumed_optimizer_matches_the_loaded_layout(path):
    """The checkpoint is of a contiguous run, and the model that goes on is channels-last."""
    steps = {"conv2d_memory_format": {}}
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3))
    batches = [torch.randn(2, 3, 9, 9) for _ in range(6)]

    def train(model, optimizer, some):
        for batch in some:
            optimizer.zero_grad(set_to_none=True)
            model(batch).square().mean().backward()
            optimizer.step()

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    train(plain, optimizer, batches[:3])
    save(plain, path)
    kept = copy.deepcopy(optimizer.state_dict())

    def build():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3))

    loaded = load(path, build, pipeline=Pipeline.from_config(steps))
    resumed = torch.optim.AdamW(loaded.model.parameters(), lr=1e-2, fused=True)
    loaded.pipeline.apply(loaded.model, optimizer=resumed)
    resumed.load_state_dict(kept)
    train(loaded.model, resumed, batches[3:])
    train(plain, optimizer, batches[3:])
    assert loaded.model[0].weight.stride() == (27, 1, 9, 3)
    for ours, theirs in zip(loaded.model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_manifest_has_the_recipe_and_every_tensor(path):
    model = Awkward()
    save(model, path, pipeline=pipeline())
    beside = path.with_name(f"{path.name}.json")
    found = json.loads(beside.read_text())
    assert found["steps"] == pipeline().to_config()
    assert found["tied"] == {"head.weight": "embedding.weight"}
    state = model.state_dict()
    assert [row[0] for row in found["tensors"]] == [name for name in state if name != "head.weight"]
    rows = {name: (dtype, shape) for name, dtype, shape, _ in found["tensors"]}
    assert rows["table"] == ("float32", [3, 4])
    assert rows["phase"] == ("complex64", [1])
    beside.unlink()
    assert load(path, Awkward, rename=None, strict=False).pipeline.to_config() == {}
    with pytest.raises(CheckpointError, match=rf"has no {path.name}\.json beside it"):
        load(path, Awkward, check="always")


def test_an_exported_model_has_only_classes_of_torch(tmp_path):
    torch.manual_seed(0)
    model = Awkward().eval()
    names = {name: id(p) for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    kept = model.conv.register_forward_hook(lambda *_: None)
    plain = {name: t.stride() for name, t in model.state_dict().items()}
    steps = {
        "conv2d_memory_format": {},
        "repair_layout": {"force": True},
        "input_format": {"attach": True},
    }
    image = torch.randn(2, 3, 9, 9)
    expected = model(image)
    Pipeline.from_config(steps | {"compile": {"backend": "eager"}}).apply(model)
    assert [type(module) for module in model.modules()] != classes
    assert export(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert {name: t.stride() for name, t in model.state_dict().items()} == plain
    assert {name: id(p) for name, p in model.named_parameters()} == names
    assert not model._forward_pre_hooks
    assert model._compiled_call_impl is None
    assert kept.id in model.conv._forward_hooks
    kept.remove()
    assert torch.equal(model(image), expected)
    whole = small().append(nn.InstanceNorm2d(2))
    Pipeline.from_config(steps).apply(whole)
    torch.save(whole, tmp_path / "ours.pt")
    torch.save(export(whole), tmp_path / "theirs.pt")
    assert b"prepare" in (tmp_path / "ours.pt").read_bytes()
    assert b"prepare" not in (tmp_path / "theirs.pt").read_bytes()


def test_a_model_that_cannot_be_exported_stays_prepared():
    model = small()
    prepared = Pipeline.from_config({"conv2d_memory_format": {}, "compile": {"backend": "eager"}})
    prepared.apply(model)
    model.forward(torch.randn(1, 3, 5, 5)).sum().backward()
    before = state_of(model)
    with pytest.raises(RefusedError, match=r"holds a \.grad"):
        export(model)
    assert same_state(state_of(model), before)
    assert not prepared.plan(model)


def test_export_keeps_a_compilation_of_the_user():
    model = Pipeline.from_config(
        {"conv2d_memory_format": {}, "compile": {"backend": "eager"}}
    ).apply(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 3)))
    model[0].compile(backend="eager")
    own = model[0]._compiled_call_impl
    export(model)
    assert model._compiled_call_impl is None
    assert model[0]._compiled_call_impl is own
