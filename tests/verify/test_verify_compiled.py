"""Test the verification of compiled models."""

import pytest
import torch
from torch import nn

from prepare.stages.verify import verify
from verify_checks import FLAT, prepared
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
