"""Large tensors are copied in parts, by several threads, to the same values as in one copy."""

import os
import threading

import pytest
import torch
from torch import nn

from prepare.core.model.memory_format import canonical_stride
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline, transfer
from prepare.pipeline.transfer import copy_part, split

SHAPES = {
    (130, 70, 5, 5): "channels_last",
    (300, 1, 30, 30): "channels_last",
    (300, 400, 1, 1): "channels_last",
    (1, 70, 20, 30): "channels_last",
    (60, 60, 3, 3, 3): "channels_last_3d",
    (60, 60, 3, 3, 4): "contiguous",
}


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("source_format", ["contiguous", "own", "sliced"])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_the_whole_tensor(shape, source_format, kind, dtype, monkeypatch):
    monkeypatch.setattr(transfer, "_PART", 2**16)
    source = torch.randn(*shape[:-1], shape[-1] + 2, dtype=kind)[..., 2:]
    if source_format != "sliced":
        memory_format = SHAPES[shape] if source_format == "own" else "contiguous"
        source = source.contiguous(
            memory_format=getattr(torch, f"{memory_format}_format", None)
            or getattr(torch, memory_format)
        )
    target = torch.empty_strided(shape, canonical_stride(shape, SHAPES[shape]), dtype=dtype)
    parts = split(target, source)
    assert {copy_part(part) for part in parts} == {True}
    assert torch.equal(target, source.to(dtype))
    assert len(parts) > 1 or shape[0] == 1


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
    assert (torch.get_num_threads(), threading.active_count()) == (3, threads)


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
