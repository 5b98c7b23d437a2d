"""A stage that another package brings: nothing in this one names it, and all of it works."""

import json
import subprocess
import sys

import pytest

import example_packages
from paths import ROOT

MODEL = ("model=unet2d", "model.width=2", "model.depth=2", "input.shape=[1,1,8,8]")
QUICK = ("memfmt=channels_last", "bench=none", "verify=none")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return example_packages.installed("example_stage", tmp_path_factory.mktemp("stage"))


@pytest.fixture
def run(site, tmp_path):
    def call(*words, code=0, **variables):
        done = subprocess.run(
            [sys.executable, str(ROOT / "run.py"), *words],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={"PYTHONPATH": f"{site}:{ROOT}", "PATH": "/usr/bin:/bin", **variables},
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def test_a_run_has_its_row_file_section_and_figure(run, tmp_path):
    out = run(*MODEL, *QUICK, "task=depths", "hydra.run.dir=out")
    assert "  deep?     3 deep" in out
    folder = tmp_path / "out"
    assert json.loads((folder / "depths.json").read_text()) == {"depth": 3, "most": 9}
    assert json.loads((folder / "result.json").read_text())["figures"]["tree_depth"] == 3
    page = (folder / "report.html").read_text()
    assert '<section id="depths"' in page
    assert "3 deep" in page
    assert "Depth of the tree" in page


@pytest.mark.slow
def test_its_option_decides_the_status_and_the_exit_code(run, tmp_path):
    out = run(*MODEL, *QUICK, "task=depths", "depths.most=2", "hydra.run.dir=out", code=3)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("verification_failed", "depths")
    assert "is 3" in result["error"]
    assert "Traceback" not in out


def test_help_knows_its_word_and_its_option(run):
    assert "task=depths" in run("--help")
    assert "depths.most=4" in run("--help", "depths")
    out = run("--help", "all")
    assert "depths.most=4" in out
    assert "largest depth" in out
    assert "depths.json" in out
