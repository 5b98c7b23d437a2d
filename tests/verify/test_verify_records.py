"""Test that a verification is saved, loaded and shown."""

import json

import pytest
import torch
from torch import nn

from prepare.errors import VerificationError
from prepare.stages.verify import Verification
from verify_checks import FLAT, PIPELINES, check, flat_norm


def test_a_verification_round_trips_through_its_file(tmp_path):
    reference, batch = flat_norm(nn.SiLU())
    result = check(reference, PIPELINES["bfloat16"] | {"repair_layout": None}, batch, mode="train")
    result.save(tmp_path / "verify.json")
    assert Verification.load(tmp_path / "verify.json") == result
    data = json.loads((tmp_path / "verify.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.verify", 1)


@pytest.mark.parametrize(
    "change",
    [{"format": "prepare.flow"}, {"version": 2}, {"status": "fine"}, {"checks": [{}]}, {"more": 1}],
)  # fmt: skip
def test_a_file_that_is_not_a_verification_is_refused(tmp_path, change):
    path = tmp_path / "verify.json"
    check(nn.Conv2d(3, 4, 3), FLAT, torch.randn(1, 3, 8, 8)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VerificationError, match=r"verify\.json"):
        Verification.load(path)
