"""Test the verification of compiled models."""

import pytest
import torch

from prepare.stages.verify import verify
from verify_checks import FLAT, prepared
from verify_faults import Net


@pytest.fixture(autouse=True)
def _no_compiled_code_of_another_test():
    torch._dynamo.reset()


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
