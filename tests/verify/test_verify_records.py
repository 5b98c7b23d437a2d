"""Test that a verification is saved, loaded and shown."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.errors import VerificationError
from prepare.stages.verify import Verification
from prepare.stages.verify.document import error_text, verify_document, verify_sentence
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


@pytest.mark.parametrize(
    ("size", "text"),
    [(2.3, "230 %"), (16.3726, "1,600 %"), (0.996, "100 %"), (0.18, "18 %"), (0.09, "")],
)
def test_gradients_whose_errors_noise_hides_are_cannot_tell(size, text):
    result = check(nn.Conv2d(3, 4, 3), FLAT, torch.randn(1, 3, 8, 8))
    checks = [
        replace(item, sensitivity=size) if "gradients" in item.what else item
        for item in result.checks
    ]
    result = replace(result, checks=tuple(checks))
    hidden = f"gradients unclear (noise hides errors below {text})"
    sentence = verify_sentence(result)
    assert sentence.startswith(f"pass: outputs right; {hidden}; " if text else "pass: ")
    assert (hidden if text else "gradients right") in error_text(replace(result, mode="train"))
    shown = verify_document(SimpleNamespace(found={"verify": replace(result, mode="train")}))
    assert shown.answers[0].answer == ("Outputs right" if text else "Yes")
    assert "e+0" not in sentence
    assert f"{text} in gradients" in sentence
