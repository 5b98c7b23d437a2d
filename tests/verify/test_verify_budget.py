"""Test the limits of time and memory, and runs that do not fit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.stages.verify import case, verify
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
    monkeypatch.setattr(case, "free_memory", lambda _: 2000)
    result = check(Net(), FLAT, torch.randn(2, 3, 16, 16))
    assert result.status == "cannot tell"
    assert "are free" in result.reason


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_fault_is_found_where_float64_does_not_fit(mode, monkeypatch):
    reference, batch = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Tanh()), torch.randn(2, 2, 32, 32)
    pipeline, model = prepared(reference, FLAT)
    model[0].register_forward_hook(lambda _module, _args, out: out * 1.01)
    seen = set()
    for power in range(13, 25):
        monkeypatch.setattr(case, "free_memory", lambda _, free=2**power: free)
        result = verify(reference, model, batch, pipeline=pipeline, mode=mode, seconds=600.0)
        seen.add((result.status, result.culprit, result.reference))
    assert seen == {("cannot tell", "", ""), ("fail", "0", "float32"), ("fail", "0", "float64")}
