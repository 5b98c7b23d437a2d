"""The step compile: what stays the same, what is refused, and the results of each backend."""

import copy
import inspect
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paths import ROOT
from prepare.cli import main as cli
from prepare.core.forward import compiled, conv_layouts
from prepare.core.forward.example_input import Example
from prepare.errors import ConfigError, FileError, PatternError, RefusedError
from prepare.job.analyses import flow_without_repairs
from prepare.job.settings import read_settings
from prepare.models.unet import UNet2d
from prepare.pipeline import Pipeline
from prepare.recipe import load
from prepare.steps import compile as compiling
from small_nets import facts


class Net(nn.Module):
    """One convolution of a user's own class."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).relu()


def pipeline(**options):
    return Pipeline.from_config({"compile": {"backend": "eager", **options}})


@pytest.fixture
def graphs(monkeypatch):
    """Register a backend `counted`, and return the list of graphs that it compiles."""
    graphs = []

    def counted(graph, example):
        graphs.append(graph)
        return graph.forward

    counted._tags = ()
    registry = torch._dynamo.backends.registry
    monkeypatch.setitem(registry._BACKENDS, "counted", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "counted", counted)
    return graphs


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


def test_each_model_of_one_class_has_a_compilation_cache(graphs):
    models = [pipeline(backend="counted").apply(Net()) for _ in range(10)]
    for net in models:
        net(torch.randn(1, 3, 8, 8))
    assert len(graphs) == len(models) > torch._dynamo.config.recompile_limit


class Broken(nn.Module):
    """Its forward is compiled in two parts."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Net(), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


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
    with conv_layouts.watch(net) as calls:
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
    flow = flow_without_repairs(SimpleNamespace(amp="none"), declared, net, example)
    assert "InstanceNorm2d" in {event.type for event in flow.events}
    assert net._compiled_call_impl is not None


def test_a_recipe_holds_every_option(tmp_path):
    declared = Pipeline.from_config(
        {"compile": {"mode": "max-autotune", "options": {"cpp.threads": 1}}}
    )
    declared.save(tmp_path / "recipe.yaml")
    assert load(tmp_path / "recipe.yaml")["compile"] == {
        "backend": "inductor", "mode": "max-autotune", "dynamic": None, "fullgraph": False,
        "options": {"cpp.threads": 1}, "freezing": False, "include": [],
    }  # fmt: skip
    assert Pipeline.load(tmp_path / "recipe.yaml").steps == declared.steps


def test_every_option_reaches_torch(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda call, **keywords: seen.append(keywords) or call)
    Pipeline.from_config(
        {"compile": {"dynamic": True, "fullgraph": True, "mode": "max-autotune"}}
    ).apply(Net())
    assert seen[-1] == {
        "backend": "inductor", "dynamic": True, "fullgraph": True, "mode": "max-autotune", "options": None,
    }  # fmt: skip
    options = {
        "mode": "max-autotune-no-cudagraphs",
        "options": {"cpp.threads": 1},
        "freezing": True,
    }
    Pipeline.from_config({"compile": options}).apply(Net().eval())
    assert seen[-1]["mode"] is None
    assert (
        seen[-1]["options"].items()
        >= {"max_autotune": True, "cpp.threads": 1, "freezing": True}.items()
    )


def test_openvino_computes_in_float32_unless_the_model_is_16_bit(monkeypatch):
    pytest.importorskip("openvino")
    seen = []
    monkeypatch.setattr(
        torch, "compile", lambda call, **keywords: seen.append(keywords["options"]) or call
    )
    pipeline(backend="openvino").apply(Net().eval())
    assert seen[-1] == {"aot_autograd": True, "config": {"INFERENCE_PRECISION_HINT": "f32"}}
    pipeline(backend="openvino", options={"device": "CPU"}).apply(Net().bfloat16().eval())
    assert seen[-1] == {"aot_autograd": True, "device": "CPU"}


# ------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "inductr"},
            "steps.compile.backend: 'inductr' is not a backend; did you mean 'inductor'?",
        ),
        ({"backend": ""}, "steps.compile.backend: '' is not a backend"),
        (
            {"freezing": True},
            "steps.compile.freezing: is for inductor, and the backend is eager; drop one",
        ),
        (
            {"mode": "default"},
            "steps.compile.mode: is for inductor, and the backend is eager; drop one",
        ),
    ],
)
def test_wrong_compile_options_are_configuration_errors(options, message):
    with pytest.raises(ConfigError) as caught:
        pipeline(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "of_a_plugin"},
            "steps.compile.backend: 'of_a_plugin' is not a backend; allowed: ",
        ),
        ({"backend": "tvm"}, "steps.compile.backend: tvm needs the package tvm; install it"),
        (
            {"backend": "inductor", "options": {"max_autotun": True}},
            "steps.compile.options.max_autotun: inductor has no such option; did you mean 'max_autotune'?",
        ),
        (
            {"backend": "inductor", "options": {"max_autotune": 3}},
            "steps.compile.options: Unexpected type of attr max_autotune, got int should be bool",
        ),
        (
            {"backend": "inductor", "freezing": True},
            "steps.compile.freezing: turns the weights into constants, which cannot be trained; call model.eval()",
        ),
    ],
)
def test_options_that_torch_rejects_are_refused_before_any_change(options, message):
    if options["backend"] == "tvm" and find_spec("tvm"):
        pytest.skip("tvm is installed")
    net = Net()
    with pytest.raises(RefusedError) as caught:
        pipeline(**options).apply(net)
    assert str(caught.value).startswith(message)
    assert net._compiled_call_impl is None


def test_only_inductor_reports_a_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    message = r"backend: inductor needs a C\+\+ compiler \(no-such-compiler\), which is not installed; install it"
    with pytest.raises(RefusedError, match=message):
        pipeline(backend="inductor").apply(Net())
    pipeline().apply(Net())


def test_a_missing_triton_is_reported_for_cuda(monkeypatch):
    monkeypatch.setattr(
        compiling, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    steps = {"device": {"device": "cuda"}, "compile": {}}
    bound = Pipeline.from_config(steps)._phases.runtime[0]
    assert [str(p) for p in bound.obstacles(Net())] == [
        "steps.compile.backend: inductor needs the package triton, which is not installed; "
        "install it, or use the backend aot_eager, which is not faster"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"freezing": True},
            "steps.compile.freezing: turns the weights.*choose mode=eval, or steps.compile.freezing=false",
        ),
        ({"options": {"freezing": True}}, "steps.compile.freezing: turns the weights"),
        (
            {"backend": "openvino"},
            "steps.compile.backend: openvino computes no gradients.*or another backend",
        ),
    ],
)
def test_freezing_and_openvino_are_errors_in_training(options, message):
    config = {"model": {"_target_": "torch.nn.Identity"}, "steps": {"compile": options}}
    with pytest.raises(ConfigError, match=f"^{message}"):
        read_settings({**config, "mode": "train"}, choices={})
    read_settings({**config, "mode": "eval"}, choices={})


def test_a_job_compiles_and_verifies_the_model(tmp_path, monkeypatch, capsys):
    from prepare.cli import main as cli

    monkeypatch.chdir(tmp_path)
    small = [
        "model=unet2d",
        "model.width=4",
        "model.depth=2",
        "input.shape=[1,1,16,16]",
        "device=cpu",
    ]
    steps = ["+steps.fuse_conv_bn={}", "+steps.compile.backend=eager"]
    assert cli.run([*small, *steps, "bench=none", "hydra.run.dir=out"]) == 0
    assert "verified      pass" in capsys.readouterr().out


# ---------------------------------------------------------------------------------- what is really compiled


def same_and_in_the_same_layout(backend, net, x, **options):
    reference = copy.deepcopy(net)
    pipeline(backend=backend, **options).apply(net, known_issues="ignore")
    with torch.no_grad():
        actual, expected = net(x), reference(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    return actual.stride() == expected.stride()


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_inductor_gives_the_same_values_in_the_weights_layout(norm, freezing):
    net = UNet2d(width=4, depth=2, norm=norm).eval()
    Pipeline.from_config({"conv2d_memory_format": {}}).apply(net, known_issues="ignore")
    x = torch.randn(1, 1, 32, 32)
    assert same_and_in_the_same_layout("inductor", net, x, freezing=freezing)


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [False, True])
def test_freezing_takes_effect_only_without_gradients(freezing, monkeypatch):
    from torch._inductor import compile_fx

    net, frozen = Net().eval(), []
    original = compile_fx.fw_compiler_freezing
    monkeypatch.setattr(
        compile_fx, "fw_compiler_freezing", lambda *a, **k: frozen.append(1) or original(*a, **k)
    )
    Pipeline.from_config({"compile": {"freezing": freezing}}).apply(net)
    x = torch.randn(1, 3, 8, 8)
    net(x)
    assert frozen == []
    with torch.no_grad():
        net(x)
    assert bool(frozen) is freezing


@pytest.mark.slow
def test_openvino_gives_the_same_values_in_float32():
    pytest.importorskip("openvino")
    code = """
import sys, torch, warnings
warnings.simplefilter("ignore")
sys.path[:0] = ["tests/steps", "tests/networks", "tests/support"]
from test_compile import UNet2d, same_and_in_the_same_layout
net = UNet2d(width=4, depth=2).eval()
same_and_in_the_same_layout("openvino", net, torch.randn(1, 1, 32, 32))
import openvino.frontend.pytorch.torchdynamo.execute as execute
assert len(execute.compiled_cache) == 1  # not inductor, its fallback
"""
    # It changes torch's global settings when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ------------------------------------------------------------------------------ regions


class Block(nn.Module):
    """A block that a network has several of."""

    def __init__(self, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(x).relu() + x


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), Block()).eval()


def test_equal_regions_are_compiled_once(graphs):
    net, x = blocks(), torch.randn(2, 3, 8, 8)
    expected = net(x)
    prepared = pipeline(backend="counted", include=["type:Block"])
    assert [action.modules for action in prepared.plan(net).actions] == [("1", "2", "3")]
    prepared.apply(net)
    with torch.no_grad():
        assert torch.equal(net(x), expected)
    assert len(graphs) == 1
    assert net._compiled_call_impl is None
    assert not prepared.plan(net)


def test_regions_of_different_weights_share_code_and_not_values(graphs):
    net, x = blocks(), torch.randn(2, 3, 8, 8)
    pipeline(backend="counted", include=["type:Block"]).apply(net)
    with torch.no_grad():
        net(x)
        net[2].conv.weight.zero_()
        net[2].conv.bias.zero_()
        expected = copy.deepcopy(net)(x)  # a copy is not compiled
        assert torch.equal(net(x), expected)
    assert len(graphs) == 1


def test_the_outermost_of_nested_matches_is_compiled():
    net = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    plan = pipeline(include=["type:Block", "0"]).plan(net)
    assert [action.modules for action in plan.actions] == [("0", "1")]


def test_undo_reverts_regions_and_leaves_compilations_of_the_user():
    prepared = blocks()
    pipeline(include=["type:Block"]).apply(prepared)
    prepared[0].compile(backend="eager")
    compiling.undo(prepared)
    assert [module._compiled_call_impl is None for module in prepared] == [False, True, True, True]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"include": ["type:Blok"]}, PatternError, "steps.compile.include: 'type:Blok' matches no module"),
        ({"include": ["type:Blok"]}, PatternError, "did you mean 'type:Block'?"),
        (
            {"backend": "inductor", "include": ["1"], "freezing": True},
            ConfigError,
            "steps.compile.include: shares code between equal modules, and freezing makes constants",
        ),
    ],
)  # fmt: skip
def test_regions_that_cannot_be_compiled_are_refused(options, error, says):
    with pytest.raises(error) as raised:
        pipeline(**options).apply(blocks())
    assert says in str(raised.value)


# ------------------------------------------------------------------------------ compiled code that is kept


def test_a_cache_counts_graphs_and_restores_the_folder(tmp_path, monkeypatch):
    counters = torch._dynamo.utils.counters["inductor"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "before"))
    monkeypatch.setitem(counters, "fxgraph_cache_hit", 3)
    with compiling.cache(tmp_path / "code") as cache:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code")
        monkeypatch.setitem(counters, "fxgraph_cache_hit", 5)
        monkeypatch.setitem(counters, "fxgraph_cache_miss", 1)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "before")
    assert (cache.read, cache.compiled, str(cache)) == (2, 1, "2 graphs read, 1 compiled")


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be made: .*; choose another folder"):
        with compiling.cache(tmp_path / "file" / "code"):
            pass


def test_a_job_counts_what_it_compiled_and_read(tmp_path, capsys):
    words = ["model._target_=sample_nets.Net", "input.shape=[2,3,16,16]", "bench=none", "flow=none"]
    step = "+steps.compile={backend: eager}"
    folder = tmp_path / "code"
    assert (
        cli.run([*words, step, f"compile.save={folder}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    )
    assert folder.is_dir()
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 graphs read, 0 compiled" in shown


COLD = """
import sys, torch
from torch import nn
from prepare.pipeline import Pipeline
from prepare.steps import compile
torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
Pipeline.from_config({"compile": {}}).apply(net)
with compile.cache(sys.argv[1]) as cache, torch.no_grad():
    net(torch.ones(1, 3, 8, 8))
print(cache.read, cache.compiled)
"""


@pytest.mark.slow
def test_a_later_process_with_the_folder_compiles_nothing(tmp_path):
    command = [sys.executable, "-c", COLD, str(tmp_path)]
    ran = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        for _ in range(2)
    ]
    assert ran == ["0 1", "1 0"]
