"""Test the verification of compiled models."""

import pytest
import torch
from torch import nn

from prepare.stages.verify import verify
from verify_checks import FIXED, FLAT, Draws, prepared
from verify_faults import Net


@pytest.fixture(autouse=True)
def _no_compiled_code_of_another_test():
    torch._dynamo.reset()


class Thinning(nn.Module):
    def __init__(self, part=0.0):
        super().__init__()
        self.linear, self.part = nn.Linear(64, 64), part

    def forward(self, batch):
        return nn.functional.dropout(self.linear(batch), self.part, training=self.training)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_compiled_model_is_compared_without_and_with_compiler(mode):
    reference = Net()
    _, model = prepared(reference, FLAT)
    model.compile(backend="aot_eager")
    result = verify(
        reference.train(mode == "train"),
        model.train(mode == "train"),
        torch.randn(2, 3, 16, 16),
        mode=mode,
    )
    assert (result.status, result.reason) == ("pass", "")
    compiled = [check.what for check in result.checks if check.inputs == "compiled"]
    assert compiled == ["outputs"]


@pytest.mark.skipif(
    torch.__version__ < (2, 6),
    reason="Dynamo of torch 2.5 compiles again where a module hook is registered for all modules",
)
@pytest.mark.parametrize("attach", [True, False])
def test_a_compiled_model_gets_user_inputs_and_is_not_recompiled(attach):
    graphs, example = [], torch.randn(1, 3, 16, 16)

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    reference = Net().eval()
    steps = {"conv2d_memory_format": {}, "input_format": {"attach": attach}}
    pipeline, model = prepared(reference, steps)
    model.compile(backend=counting)
    with torch.no_grad():
        model(example if attach else pipeline.format(example))
    compiled = len(graphs)
    result = verify(reference, model, example, pipeline=pipeline, gradients=False)
    assert (result.status, len(graphs)) == ("pass", compiled)
    assert compiled


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_compiler_that_computes_something_else_is_blamed(mode):
    def wrong(graph, inputs):
        return lambda *args: [2 * output for output in graph.forward(*args)]

    reference = Thinning()
    _, model = prepared(reference, {})
    model.compile(backend=wrong)
    result = verify(reference, model, torch.randn(1, 64), mode=mode)
    assert result.status == "fail"
    assert result.reason.startswith(f"outputs ({mode} mode, compiled, batch 1): output is off by")
    assert "the compiler computes something else" in result.advice


def test_a_compiler_that_fails_fails_the_verification():
    def broken(graph, inputs):
        raise RuntimeError("no kernel")

    reference = Thinning()
    _, model = prepared(reference, {})
    model.compile(backend=broken)
    result = verify(reference, model, torch.randn(1, 64))
    assert result.status == "fail"
    assert "no kernel" in result.reason


@pytest.mark.parametrize(
    ("reference", "mode"),
    [(Thinning(0.5), "train"), (Draws(FIXED["randn_like"]), "eval")],
    ids=["dropout", "noise"],
)
def test_random_numbers_of_a_compiled_model_are_cannot_tell(reference, mode):
    reference.train(mode == "train")
    _, model = prepared(reference, {})
    model.compile(backend="aot_eager")
    batch = torch.randn(4, 64) if mode == "train" else torch.randn(2, 3, 8, 8)
    result = verify(reference, model, batch, mode=mode)
    assert result.status == "cannot tell"
    assert "cannot be fixed" in result.reason
