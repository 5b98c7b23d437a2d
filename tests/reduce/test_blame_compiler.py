"""Test that torch's own bisector names the part of the compiler that is wrong."""

import pytest
import torch
from torch import nn

from prepare.app.cli.main import run
from prepare.core.forward.compiled import compile_cache
from prepare.pipeline import Pipeline
from prepare.stages.reduce.blame_compiler import blame_compiler
from prepare.stages.verify import verify

bisector = pytest.importorskip("torch._inductor.compiler_bisector", reason="torch 2.6 and newer")
DECOMPOSED = "aot_eager_decomp_partition"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.silu(self.linear(x))


def compiled(backend):
    torch.manual_seed(0)
    pipeline = Pipeline.from_config({"compile": {"backend": backend}})
    return pipeline, pipeline.apply(Net().eval())


def planted(monkeypatch, decomposition):
    """Let the compiler decompose SiLU in this way."""
    table = {torch.ops.aten.silu.default: decomposition}
    monkeypatch.setattr("torch._inductor.compile_fx.select_decomp_table", lambda: table)


@pytest.fixture
def wrong_silu(monkeypatch):
    planted(monkeypatch, lambda x: x * torch.sigmoid(x) * 1.5)


def test_a_wrong_decomposition_is_named(wrong_silu, capsys):
    pipeline, model = compiled(DECOMPOSED)
    batch, reference = torch.randn(2, 8), Net().eval()
    reference.load_state_dict(model.state_dict())
    found = verify(reference, model, batch, pipeline=pipeline, gradients=False)
    assert "task=reduce names the part" in found.advice
    text = blame_compiler(model, batch, pipeline=pipeline, training=False)
    assert text.startswith(f"torch's bisector blames the backend {DECOMPOSED}: decomposition")
    assert "silu" in text
    assert capsys.readouterr().out == ""
    with torch.no_grad():  # it is compiled again as it was
        assert torch.allclose(model(batch), reference(batch) * 1.5)


def test_an_operation_that_raises_in_the_compiler_is_named(monkeypatch):
    def raising(x):
        raise RuntimeError("no such kernel")

    planted(monkeypatch, raising)
    pipeline, model = compiled(DECOMPOSED)
    text = blame_compiler(model, torch.randn(2, 8), pipeline=pipeline, training=True)
    assert text.startswith(f"torch's bisector blames the backend {DECOMPOSED}: decomposition")
    assert "silu" in text


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_backend_that_is_not_torchs_is_named(is_real, monkeypatch):
    def wrong(graph, inputs, **options):
        return lambda *args: [2 * output for output in graph.forward(*args)]

    if not is_real:
        monkeypatch.setattr(bisector.CompilerBisector, "do_bisect", lambda _: None)
    name = f"wrong_backend_{is_real}"
    torch._dynamo.register_backend(wrong, name)
    pipeline, model = compiled(name)
    text = blame_compiler(model, torch.randn(2, 8), pipeline=pipeline, training=False)
    assert text == f"torch's own backends are right; only the backend {name} is wrong"


def test_rounding_of_a_compiled_model_is_not_blamed():
    pipeline, model = compiled("aot_eager")
    text = blame_compiler(model, torch.randn(2, 8), pipeline=pipeline, training=True)
    assert text == "the compiled model differs from the same without its compiler by rounding only"


def test_the_bisection_stops_when_the_time_is_over():
    pipeline, model = compiled("aot_eager")
    given = {"pipeline": pipeline, "training": False}
    text = blame_compiler(model, torch.randn(2, 8), **given, seconds=-1.0)
    assert text.endswith("was not found within -1 s; raise verify.seconds")


def test_task_reduce_names_the_part_of_the_compiler(wrong_silu, tmp_path, capsys, monkeypatch):
    words = ["model._target_=test_blame_compiler.Net", "input.shape=[2,8]", "device=cpu"]
    words += [f"+steps.compile.backend={DECOMPOSED}", "task=reduce"]
    assert run([*words, f"hydra.run.dir={tmp_path}"]) == 3
    assert "blames the backend" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "reduced.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_a_wrong_lowering_of_inductor_is_named(training, tmp_path, monkeypatch):
    from torch._inductor import lowering

    exp = torch.ops.aten.exp.default
    right = lowering.lowerings[exp]
    monkeypatch.setitem(lowering.lowerings, exp, lambda x: lowering.mul(right(x), 1.5))
    pipeline, model = compiled("inductor")
    given = {"pipeline": pipeline, "training": training, "seconds": 600.0}
    with compile_cache(tmp_path):  # the code of a right lowering may be in another
        text = blame_compiler(model.train(training), torch.randn(2, 8), **given)
    assert text.startswith("torch's bisector blames the backend inductor: lowerings")
    assert "exp" in text
