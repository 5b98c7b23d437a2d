"""The step compile: what stays the same, undo, copies, and hooks."""

import copy
import pickle

import pytest
import torch
from torch import nn

from compile_checks import Net, pipeline
from prepare.errors import RefusedError
from prepare.steps import compile as compiling
from small_nets import facts


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_keeps_the_object_its_tensors_and_its_outputs(backend):
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    before, expected = facts(net), net(x)
    assert pipeline(backend=backend).apply(net) is net
    assert facts(net) == before
    assert torch.equal(net(x), expected)


@pytest.mark.parametrize("make", [Net, lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())])
def test_the_whole_call_is_one_graph_also_for_torchs_own_forward(make, graphs):
    net = pipeline(backend="counted", fullgraph=True).apply(make())
    net(torch.randn(2, 3, 8, 8))
    assert len(graphs) == 1
    kinds = {node.op for node in graphs[0].graph.nodes}
    assert "call_function" in kinds or "call_module" in kinds


@pytest.mark.slow
def test_each_model_of_one_class_has_a_compilation_cache(graphs):
    models = [pipeline(backend="counted").apply(Net()) for _ in range(10)]
    for net in models:
        net(torch.randn(1, 3, 8, 8))
    assert len(graphs) == len(models) > torch._dynamo.config.cache_size_limit


def test_the_same_options_are_recognised_and_others_refused():
    net = pipeline().apply(Net())
    assert not pipeline().plan(net)
    pipeline().apply(net)
    for other in ({"dynamic": True}, {"backend": "aot_eager"}):
        assert pipeline(**other).plan(net)
        with pytest.raises(RefusedError, match="is compiled already.*prepare first, then compile"):
            pipeline(**other).apply(net)
    own = Net()
    own.compile(backend="eager")
    with pytest.raises(RefusedError, match="is compiled already"):
        pipeline().apply(own)


def test_undo_removes_the_compilation(graphs):
    net = pipeline(backend="counted").apply(Net())
    compiling.undo(net)
    assert net._compiled_call_impl is None
    net(torch.randn(1, 3, 8, 8))
    assert graphs == []
    pipeline().apply(net)


def test_a_copy_and_a_pickle_are_uncompiled_and_compilable():
    net = pipeline().apply(Net())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other._compiled_call_impl is None
        assert pipeline().plan(other)
        pipeline().apply(other)
        assert not pipeline().plan(other)
