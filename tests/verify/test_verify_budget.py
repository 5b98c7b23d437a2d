"""Test the limits of time and memory, and runs that do not fit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.stages.verify import budget, verify
from prepare.stages.verify.document import verify_document
from verify_checks import FLAT, check, prepared
from verify_faults import Net


def test_a_run_that_does_not_fit_is_cannot_tell_with_the_reason():
    result = check(Net(), FLAT, torch.randn(2, 3, 16, 16), seconds=1e-9)
    assert result.status == "cannot tell"
    assert "s are left" in result.reason
    (advice,) = verify_document(SimpleNamespace(found={"verify": result})).advice
    assert advice.answer == "Raise verify.seconds"


def test_a_run_that_is_too_large_is_cannot_tell(monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda _: 2000)
    result = check(Net(), FLAT, torch.randn(2, 3, 16, 16))
    assert result.status == "cannot tell"
    assert "are free" in result.reason


def deep(layers=40):
    parts = [part for _ in range(layers) for part in (nn.Conv2d(2, 2, 1), nn.Tanh())]
    return nn.Sequential(*parts), torch.randn(2, 2, 32, 32)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_fault_is_found_where_float64_does_not_fit(mode, monkeypatch):
    reference, batch = deep()
    pipeline, model = prepared(reference, FLAT)
    model[78].register_forward_hook(lambda _module, _args, out: out * 1.01)
    seen = []
    for power in range(15, 31):
        monkeypatch.setattr(budget, "free_memory", lambda _, free=2**power: free)
        options = {"pipeline": pipeline, "mode": mode, "seconds": 600.0}
        result = verify(reference, model, batch, **options)
        seen.append((result.status, result.reference))
        assert result.status == "cannot tell" or result.culprit == "78"
    assert {status for status, _ in seen} == {"cannot tell", "fail"}
    assert {("fail", "float32"), ("fail", "float64")} <= {*seen}
