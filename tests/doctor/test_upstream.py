"""The scripts for PyTorch show what they say, on this torch; each has a text on the doctor's page."""

import os
from pathlib import Path

import pytest
import torch

import prepare
from prepare.core.model.known_issues import issues
from prepare.core.utils.child_process import ForkedRunner

FOLDER = Path(prepare.__file__).parents[1] / "docs" / "upstream"
SCRIPTS = sorted(FOLDER.glob("*.py"))
ISSUES = {issue.name: issue for issue in issues()}
CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""


def test_every_script_belongs_to_a_known_issue_and_has_a_text():
    assert len(SCRIPTS) == 4
    page = (FOLDER.parent / "doctor.md").read_text()
    for path in SCRIPTS:
        assert path.stem in ISSUES
        assert f"`{path.name}`" in page
        assert len(path.read_text().splitlines()) <= 25


def outcome(script):
    """Run a script in this process, whose memory is not all zeros, as that of a new one may be."""
    try:
        exec(compile(script, "script.py", "exec"), {"__name__": "__main__"})
    except AssertionError:
        return "wrong"
    return "right"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="scripts run in a forked process")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_shows_its_fault_on_this_torch(path):
    if not ISSUES[path.stem].stands("cpu", torch.__version__, {}):
        pytest.skip("this torch is not in the entry's range")
    if "bfloat16" in path.stem and ("avx512_bf16" not in CPU or "amx_bf16" in CPU):
        pytest.skip("other kernels run on this processor")
    runner = ForkedRunner(outcome)
    found = [runner.ask(path.read_text(), seconds=30.0) for _ in range(3)]
    runner.stop()
    killed = {"was killed by SIGSEGV", "was killed by SIGABRT"}
    outcomes = {answer or death for answer, death in found}
    if "depthwise" in path.stem and outcomes == {"right"}:
        pytest.skip("the memory out of bounds that the kernel reads holds zeros here")
    assert outcomes <= {"wrong", *killed}
