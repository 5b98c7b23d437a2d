"""Test that the flow and the verification name known issues that depend on the size of a call."""

import pytest
import torch
from torch import nn

from prepare.core.model import known_issues
from prepare.core.model.known_issues import SIZES, CallIssues, issues
from prepare.pipeline import Pipeline
from prepare.stages.flow import observe, predict

NAME = "conv3d_bfloat16_small_cpu"
SMALL, LARGE = (2, 8, 2, 2, 2), (2, 8, 4, 4, 4)


@pytest.fixture(autouse=True)
def table(monkeypatch):
    # Every entry, whatever torch and processor run the test.
    monkeypatch.setattr(known_issues, "standing", lambda _: issues())


def conv(dtype=torch.bfloat16, **options):
    return nn.Conv3d(8, 8, 3, padding=1, **options).to(dtype)


def names_of(module, shape):
    return [issue.name for issue in CallIssues("cpu").of(module, shape)]


def test_only_a_call_of_that_size_has_the_issue():
    assert names_of(conv(), SMALL) == [NAME]
    assert names_of(conv(), LARGE) == []
    assert names_of(conv(torch.float32), SMALL) == []
    assert names_of(nn.Conv2d(8, 8, 3).bfloat16(), (2, 8, 2, 2)) == []
    assert names_of(nn.Linear(2, 2), (2, 2)) == []


def test_a_repaired_module_does_not_have_the_issue():
    model = nn.Sequential(conv())
    Pipeline.from_config({"repair_layout": {"force": True}}).apply(model, known_issues="ignore")
    assert names_of(model[0], SMALL) == []


@pytest.mark.parametrize("follow", [predict, observe])
def test_the_flow_notes_a_call_with_wrong_numbers(follow):
    model = nn.Sequential(conv(), nn.MaxPool3d(2), conv())
    note = follow(model, torch.randn(LARGE).bfloat16()).notes[-1]
    assert note.startswith(f"2 is wrong on this device {SIZES['smaller_than_kernel'].what}")
    assert NAME in note
