"""Test the limits of time and memory, and runs that do not fit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.stages.verify.document import verify_document, verify_sentence
from verify_checks import FLAT, check
from verify_faults import Net


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"memory": 1000}, "the limit is 1000 bytes"), ({"seconds": 1e-9}, "s are left")],
)
def test_a_run_that_does_not_fit_is_cannot_tell_with_the_reason(limit, reason):
    result = check(Net(), FLAT, torch.randn(2, 3, 16, 16), **limit)
    assert result.status == "cannot tell"
    assert reason in result.reason
    (advice,) = verify_document(SimpleNamespace(found={"verify": result})).advice
    assert advice.answer == f"Raise verify.{next(iter(limit))}"


def deep(layers=40):
    parts = [part for _ in range(layers) for part in (nn.Conv2d(2, 2, 1), nn.Tanh())]
    return nn.Sequential(*parts), torch.randn(2, 2, 32, 32)


def by_limit(mode, wanted):
    """Return the verification with the smallest limit of memory with which `wanted(result)` is true."""
    model, batch = deep()
    for power in range(14, 30):
        result = check(model, FLAT, batch, mode=mode, memory=2**power, seconds=600.0)
        if wanted(result):
            return result
    raise AssertionError("no limit does it")


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_modules_are_compared_alone_where_float64_does_not_fit(mode):
    result = by_limit(mode, lambda found: found.reference == "float32")
    found = {item.what: item for item in result.checks}
    assert result.status == "pass"
    assert found["module outputs"].status == "pass"
    assert found["module outputs"].compared == 80
    assert "80 modules" in verify_sentence(result)
    assert by_limit(mode, lambda found: found.reference == "float64").status == "pass"


def test_gradients_that_do_not_fit_are_skipped_in_mode_eval():
    result = by_limit("eval", lambda found: found.status == "pass")
    notes = {item.what: item.note for item in result.checks if item.status == "skipped"}
    assert {"input gradients", "parameter gradients"} <= set(notes)
    assert "raise verify.memory" in notes["input gradients"]
    assert by_limit("train", lambda found: True).status == "cannot tell"
