"""Mistakes on the command line and models that do not suit it: one line, exit code 2."""

import re
import subprocess
import sys

import pytest

from paths import RUN
from words import UNET3D

NO_CONV2D = (
    "steps.conv2d_memory_format: UNet3d has no Conv2d and 8 Conv3d; "
    "did you mean the step conv3d_memory_format (memfmt=channels_last_3d)?"
)


def test_a_folder_of_options_that_is_not_there_is_one_line(go, tmp_path):
    ran = go("model=unet3d", "--config-dir", "nope")
    assert (ran.code, ran.out, list(tmp_path.iterdir())) == (2, "", [])
    assert ran.err == f"Additional config directory '{tmp_path / 'nope'}' not found\n"


def test_what_the_configuration_shows_is_found_without_torch(tmp_path):
    code = """
import sys
from prepare.app.cli import main as cli
for argv in (
    ["--help"], ["steps"], ["--version"], ["model=unet3dd"], ["memfmt=x", "+typo=1"],
    ["model=unet3d", "precision=half", "steps.half.dtype=x"], ["--cfg", "job", "model=unet3d"], ["diff", "a", "b"],
    ["--multirun", "model=unet3d", "memfmt=contiguous,chanels_last"],
):
    print("CODE", argv[0], cli.run(argv))
    assert "torch" not in sys.modules, argv
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={"PYTHONPATH": str(RUN.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    codes = re.findall(r"^CODE (\S+) (\d)$", done.stdout, re.MULTILINE)
    assert [code for _, code in codes] == ["0", "0", "0", "2", "2", "2", "0", "2", "2"]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        ([*UNET3D, "memfmt=channels_last"], "no_effect", NO_CONV2D),
        (
            ["model._target_=sample_nets.Nett"],
            "failed",
            "model._target_: sample_nets has no 'Nett'; did you mean 'sample_nets.Net'?",
        ),
    ],
)
def test_an_error_that_the_model_shows_exits_2_and_has_a_page(go, argv, status, line):
    ran = go(*argv)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.splitlines() == [line]
    left = {"job.json", "environment.json", "report.html", "result.json", "prepare.log", ".hydra"}
    assert {path.name for path in ran.folder.iterdir()} == left
    assert ran.result["status"] == status
    assert ran.result["error"] == line


def test_a_request_without_effect_is_reported(go):
    ran = go(*UNET3D, "memfmt=channels_last", "strict=false")
    assert ran.code == 0
    assert NO_CONV2D in " ".join(ran.out.split())
