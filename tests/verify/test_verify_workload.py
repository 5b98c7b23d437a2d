"""A verification of several sizes: the worst one counts, and is named."""

import copy

import pytest
import torch
from torch import nn

from prepare import Workload
from prepare.core.document import ReportContext
from prepare.stages.verify import verify
from prepare.stages.verify.document import verify_document
from prepare.stages.verify.records import Verification
from prepare.stages.verify.stage import VerifyStage


class WrongFrom(nn.Module):
    """Right below a batch of `size`."""

    def __init__(self, size):
        super().__init__()
        self.conv, self.size = nn.Conv2d(3, 4, 3), size

    def forward(self, x):
        return self.conv(x) * (1.01 if len(x) >= self.size else 1.0)


def verified(size, **how):
    torch.manual_seed(0)
    model = WrongFrom(9).eval()
    prepared = copy.deepcopy(model)
    prepared.size = size
    return verify(model, prepared, Workload([torch.randn(n, 3, 6, 6) for n in (1, 4)]), **how)


def test_the_size_that_fails_is_named():
    found = verified(4)
    assert (found.status, found.size.name) == ("fail", "batch 4")
    assert found.reason.startswith("at batch 4: outputs (eval mode, batch 4): ")
    assert [each.status for each in found.sizes] == ["pass", "fail"]
    assert VerifyStage.verdict({"verify": found}).code == 3
    failed = [(check.inputs, check.batch) for check in found.checks if check.status == "fail"]
    assert failed == [("batch 4", 4)]
    texts = [text for _, text in verify_document(ReportContext(found={"verify": found})).rows]
    assert texts[0].startswith("fail: at batch 4: ")
    assert texts[1].startswith("batch 1 pass: outputs at <1 % of the tolerance")
    assert texts[2].startswith("batch 4 fail: outputs")


def test_the_largest_error_of_right_sizes_counts(tmp_path):
    found = verified(9)
    assert (found.status, found.reason) == ("pass", "")
    figures = VerifyStage.figures({"verify": found})
    outputs = [check for check in found.checks if check.what == "outputs"]
    assert figures["verified_error"] == max(check.error for check in outputs)
    assert figures["verified_at_batch_1"] == figures["verified_at_batch_4"] == "pass"
    # What needs no forward is checked once.
    assert [check.what for check in found.checks].count("values") == 1
    found.save(tmp_path / "verify.json")
    assert Verification.load(tmp_path / "verify.json") == found


@pytest.mark.slow
def test_exact_runs_are_shared_for_one_size_only():
    exact = {}
    for size in (9, 4, 9):
        found = verified(size, gradients=False, _exact_runs=exact)
        assert found.status == ("fail" if size == 4 else "pass")
    assert len(exact) == 2
