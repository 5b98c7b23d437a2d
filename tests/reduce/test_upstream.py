"""The scripts for PyTorch show what they say, on this torch; each has a text on their page."""

from pathlib import Path

import pytest
import torch

import prepare
from prepare.core.model.known_issues import issues
from prepare.core.utils.child_process import ForkedRunner
from prepare.stages.reduce.script import answer

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


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="scripts run in a forked process")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_shows_its_fault_on_this_torch(path):
    if not ISSUES[path.stem].stands("cpu", torch.__version__, {}):
        pytest.skip("this torch is not in the entry's range")
    if "bfloat16" in path.stem and ("avx512_bf16" not in CPU or "amx_bf16" in CPU):
        pytest.skip("other kernels run on this processor")
    runner = ForkedRunner(answer)
    request = {"script": path.read_text(), "dtype": "float32", "allowed": 1.0}
    found = [runner.ask(request, seconds=30.0) for _ in range(3)]
    runner.stop()
    assert {outcome[0] if outcome else death for outcome, death in found} <= {
        "wrong",
        "invalid",
        "was killed by SIGSEGV",
        "was killed by SIGABRT",
    }
