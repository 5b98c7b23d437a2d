"""The step compile: what stays the same, undo, copies, and hooks."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from compile_checks import Net, pipeline
from made_works import work
from prepare.core.forward import compiled, run_example
from prepare.core.forward.example_input import Example
from prepare.errors import RefusedError
from prepare.models.unet import UNet2d
from prepare.pipeline import Pipeline
from prepare.stages.stage import STAGES
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


class Broken(nn.Module):
    """Its forward is compiled in two parts."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Net(), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.slow
@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch keeps one cache for all",
)
def test_code_after_a_graph_break_is_compiled_for_each_model(graphs):
    for _ in range(10):
        with torch.no_grad():
            pipeline(backend="counted").apply(Broken())(torch.randn(1, 3, 8, 8))
    assert len(graphs) == 20


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


def test_a_compiled_and_called_model_gets_no_hook():
    steps = {
        "compile": {"backend": "eager"},
        "input_format": {"memory_format": "by_rank", "attach": True},
    }
    net = pipeline().apply(Net())
    net(torch.randn(1, 3, 8, 8))
    with pytest.raises(RefusedError, match="is compiled already"):
        Pipeline.from_config(steps).apply(net)


def test_the_input_hook_is_installed_before_the_first_call():
    steps = {"compile": {"backend": "eager"}, "input_format": {"dtype": "float32", "attach": True}}
    net = Pipeline.from_config(steps).apply(Net())
    assert net(torch.randn(1, 3, 8, 8, dtype=torch.float64)).dtype is torch.float32


def test_undo_removes_the_compilation(graphs):
    net = pipeline(backend="counted").apply(Net())
    compiling.undo(net)
    assert net._compiled_call_impl is None
    net(torch.randn(1, 3, 8, 8))
    assert graphs == []
    pipeline().apply(net)


def test_a_later_failure_leaves_the_model_uncompiled(plugin):
    from prepare.step import InputStep

    @plugin("fails")
    class Fails(InputStep):
        """Raises."""

        def targets(self, model):
            return ("",)

        def act(self, model):
            raise RuntimeError("no")

    net = Net()
    with pytest.raises(RuntimeError, match="no"):
        Pipeline.from_config({"compile": {"backend": "eager"}, "fails": {}}).apply(net)
    assert "_compiled_call_impl" not in vars(net)


def test_a_copy_and_a_pickle_are_uncompiled_and_compilable():
    net = pipeline().apply(Net())
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other._compiled_call_impl is None
        assert pipeline().plan(other)
        pipeline().apply(other)
        assert not pipeline().plan(other)


def test_eval_mode_and_compile_together_leave_nothing_to_do():
    both = Pipeline.from_config({"eval_mode": {}, "compile": {"backend": "eager"}})
    net = both.apply(Net())
    assert not both.plan(net)


def test_no_hook_of_ours_is_compiled_into_the_model():
    net = pipeline().apply(Net())
    with run_example.watch(net) as calls:
        net(torch.randn(1, 3, 8, 8))
    assert calls == []
    assert not net.conv._forward_hooks
    wrapped = torch.compile(Net(), backend="eager")
    assert compiled.contains_compiled(wrapped)
    assert not compiled.contains_compiled(Net())


def test_the_flow_without_repairs_works_for_a_compiled_model():
    steps = {"conv2d_memory_format": {}, "repair_layout": {}, "compile": {"backend": "eager"}}
    declared = Pipeline.from_config(steps)
    net = declared.apply(UNet2d(width=4, depth=2, norm="instance").eval())
    example = Example((torch.randn(1, 1, 16, 16),), {})
    flow = STAGES["flow"]().run(work(net, declared, formatted=example))["flow_before"]
    assert "InstanceNorm2d" in {event.type for event in flow.events}
    assert net._compiled_call_impl is not None
