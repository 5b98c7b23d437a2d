"""Test that a verification is saved, loaded and shown."""

import json

from torch import nn

from prepare.stages.verify import Verification
from verify_checks import PIPELINES, check, flat_norm


def test_a_verification_round_trips_through_its_file(tmp_path):
    reference, batch = flat_norm(nn.SiLU())
    result = check(reference, PIPELINES["bfloat16"] | {"repair_layout": None}, batch, mode="train")
    result.save(tmp_path / "verify.json")
    assert Verification.load(tmp_path / "verify.json") == result
    data = json.loads((tmp_path / "verify.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.verify", 1)
