"""The plan as plain data, and one copy of each tensor: large ones in parts, by several threads."""

import os
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.pipeline.transfer import Move, Transfer
from small_nets import small_2d

BOTH = {"half": {}, "conv2d_memory_format": {}}


def test_the_plan_as_plain_data_has_bytes_steps_and_reasons():
    import json

    plan = Pipeline.from_config({"device": {"device": "cpu"}, **BOTH}).plan(small_2d())
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["format"] == "prepare.plan"
    first = next(t for t in data["tensors"] if (t["module"], t["tensor"]) == ("0", "weight"))
    assert first["old"] == {"stride": [27, 9, 3, 1], "dtype": "float32", "device": "cpu"}
    assert first["new"] == {"stride": [27, 1, 9, 3], "dtype": "float16", "device": "cpu"}
    wanted_by = {"device": ["device"], "dtype": ["half"], "memory_format": ["conv2d_memory_format"]}
    assert first["by"] == wanted_by
    assert data["summary"]["by_step"] == {"conv2d_memory_format": 3, "half": 6}, (
        "device has nothing to do"
    )
    assert (first["bytes_old"], first["bytes_new"]) == (8 * 27 * 4, 8 * 27 * 2)
    norm = next(t for t in data["tensors"] if (t["module"], t["tensor"]) == ("1", "weight"))
    assert norm["off"] == {"half": "keep: norms"}
    assert (
        data["summary"]["bytes_before"] - data["summary"]["bytes_after"]
        == data["summary"]["bytes_written"]
    )


@pytest.mark.parametrize("low_memory", [False, True])
@pytest.mark.parametrize(
    ("source", "target", "waited"),
    [
        ("cuda:1", "cpu", {("cuda", 1)}),
        ("cpu", "cuda:1", {("cuda", 1)}),
        ("cuda:0", "cuda:1", {("cuda", 0), ("cuda", 1)}),
        ("xpu:0", "cpu", {("xpu", 0)}),
        ("mps", "cpu", {("mps", 0)}),
        ("cpu", "cpu", set()),
    ],
)
def test_new_data_has_arrived_before_the_exchange(monkeypatch, source, target, waited, low_memory):
    done = set()

    def synchronize(device):
        assert all(tensor.is_contiguous() for tensor in tensors)
        done.add((device.type, device.index))

    for kind in (torch.cuda, torch.xpu):
        monkeypatch.setattr(kind, "synchronize", synchronize)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: synchronize(torch.device("mps", 0)))
    # This machine may have no accelerator.
    monkeypatch.setattr("prepare.pipeline.transfer.copy_part", lambda part: True)
    with FakeTensorMode():
        tensors = [torch.empty(4, 3, device=source) for _ in range(2)]
        to = torch.device(target)
        moves = [Move("weight", [tensor], to, torch.float64, (1, 4)) for tensor in tensors]
        monkeypatch.setattr("prepare.pipeline.transfer._groups", lambda moves: [moves])
        Transfer(moves, low_memory=low_memory).run()
    assert [tensor.stride() for tensor in tensors] == [(1, 4)] * 2
    assert done == waited


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("value", [1e6, -1e6])
@pytest.mark.usefixtures("three_threads")
def test_a_value_that_overflows_in_any_part_is_refused(place, value):
    model = nn.Sequential(nn.Conv2d(256, 1024, 3), nn.Conv2d(256, 1024, 3))
    with torch.no_grad():
        model[1].weight.flatten()[place] = value
    threads = threading.active_count()
    pipeline = Pipeline.from_config({"half": {"dtype": "float16"}, "conv2d_memory_format": {}})
    with pytest.raises(RefusedError, match=r"1\.weight: 1 of its values would become inf"):
        pipeline.apply(model)
    assert model[0].weight.dtype is torch.float32
    assert torch.get_num_threads() == 3
    assert threading.active_count() <= threads  # one of an earlier test may have ended


@pytest.mark.parametrize("low_memory", [True, False])
@pytest.mark.usefixtures("three_threads")
def test_many_threads_give_the_values_of_one_copy(low_memory):
    model = nn.Sequential(*(nn.Conv2d(64, size, 3) for size in (100, 500, 30, 30, 2000)))
    model[2].weight.data[0] = float("inf")  # not an overflow
    model.register_buffer("table", torch.full((200_000,), 3.0))  # with a sum beyond float16
    before = [tensor.detach().clone() for tensor in (*model.parameters(), model.table)]
    pipeline = Pipeline.from_config(
        {"half": {"dtype": "float16", "keep": []}, "conv2d_memory_format": {}}
    )
    threads = threading.active_count()
    pipeline.apply(model, low_memory=low_memory)
    after = (*model.parameters(), model.table)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old.half(), new)
    assert (torch.get_num_threads(), threading.active_count()) == (3, threads)
    if hasattr(os, "fork"):
        if not (child := os.fork()):
            ok = False
            try:
                # Two elements for each thread: OpenMP itself is not safe to use in a forked process.
                ok = threading.active_count() == 1 and bool((model.table[:6] == 3).all())
            finally:
                os._exit(not ok)
        assert os.waitpid(child, 0)[1] == 0


def test_views_of_a_storage_may_begin_behind_its_start():
    flat = torch.randn(40)
    model = nn.ParameterDict({"a": nn.Parameter(flat[8:20]), "b": nn.Parameter(flat[12:28])})
    objects = [*model.values()]
    Pipeline.from_config({"half": {"dtype": "float16"}}).apply(model)
    assert all(mine is other for mine, other in zip(model.values(), objects, strict=True))
    assert torch.equal(model["a"], flat[8:20].half())
    assert torch.equal(model["b"], flat[12:28].half())
    with torch.no_grad():
        model["a"][4:].zero_()
    assert not model["b"][:8].any()
