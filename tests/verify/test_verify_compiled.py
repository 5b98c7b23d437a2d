"""Test the verification of compiled models."""

import pytest
import torch

from prepare.stages.verify import verify
from verify_checks import FLAT, prepared
from verify_faults import Net


@pytest.fixture(autouse=True)
def _no_compiled_code_of_another_test():
    torch._dynamo.reset()


def wrong(graph, _inputs):
    return lambda *args: tuple(2 * output for output in graph(*args))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("backend", ["aot_eager", wrong])
def test_a_compiled_model_is_compared_without_and_with_compiler(backend, mode):
    reference = Net().train(mode == "train")
    _, model = prepared(reference, FLAT)
    model.compile(backend=backend)
    result = verify(reference, model, torch.randn(2, 3, 16, 16), mode=mode)
    assert result.status == ("fail" if backend is wrong else "pass")
    assert ("the step compile" in result.advice) == (backend is wrong)
