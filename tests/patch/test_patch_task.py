"""task=patch: the diff in the folder, the terminal and the page, with what it saves and what stays."""

import subprocess
from pathlib import Path

import pytest

from made import make, show
from prepare.app.cli import main as cli
from prepare.stages.patch.document import patch_sentence
from prepare.stages.patch.records import Patch, PatchedCall, UnpatchedBreak

NETWORK = ("model._target_=keeping_nets.chunked", "input.shape=[2,3,2,6,7]", "task=patch")


def job(folder, *overrides):
    with pytest.raises(SystemExit) as ended:
        cli.main([*NETWORK, f"hydra.run.dir={folder}", *overrides])
    return ended.value.code


@pytest.mark.slow
def test_the_task_writes_a_verified_and_timed_patch(tmp_path, capsys):
    limits = ("bench.seconds=0.2", "bench=short")
    assert job(tmp_path, "memfmt=channels_last_3d", "verify=short", *limits) == 0
    patch = Patch.load(tmp_path / "patch.json")
    assert (tmp_path / "patch.diff").read_text() == patch.diff
    root = Path(cli.__file__).parents[3]
    done = subprocess.run(
        ["git", "apply", "--check", tmp_path / "patch.diff"],
        cwd=root,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert patch.after == (0, 0)
    assert patch.verified == "pass"
    assert patch.verdict
    out = " ".join(capsys.readouterr().out.split())
    assert f"patch {patch_sentence(patch)}" in out
    assert "patch.diff, " in out
    page = (tmp_path / "report.html").read_text()
    assert "Changed calls" in page
    assert "\n+def _keep_pad(" in page


def test_a_patch_that_is_not_timed_or_verified_says_so(tmp_path, capsys):
    assert job(tmp_path, "memfmt=channels_last_3d", "verify=none", "bench=none") == 0
    patch = Patch.load(tmp_path / "patch.json")
    assert (patch.verified, patch.verdict) == ("", "")
    assert "speed not" in " ".join(capsys.readouterr().out.split())


def test_the_task_needs_a_format_and_an_example(tmp_path, capsys):
    assert job(tmp_path / "1") == 2
    assert "memfmt: task=patch" in capsys.readouterr().err
    assert job(tmp_path / "2", "memfmt=channels_last_3d", "input.shape=null") == 2
    assert "example input" in capsys.readouterr().err


def test_a_patch_of_nothing_names_what_stays(capsys):
    left = tuple(make(UnpatchedBreak, source=f"net.py:{n}", breaks=1) for n in range(12))
    patch = make(Patch, left=left, before=(10, 12), after=(10, 12))
    show("patch", patch)
    out = capsys.readouterr().out
    assert "of 12 breaks" in out
    assert "net.py:9" in out
    assert "2 places" in out
    assert "git apply" not in out


def test_the_sentence_of_a_patch_gives_copies_breaks_and_time():
    found = {"verified": "pass", "verdict": "faster", "ratio": 0.5, "interval": (0.4, 0.6)}
    patch = make(Patch, calls=(make(PatchedCall),), before=(2048, 3), after=(0, 1), **found)
    assert patch_sentence(patch) == (
        "1 call changed: 2.0 KiB -> 0 bytes copied per forward, 3 -> 1 break, results right, "
        "2.0x faster (95 % interval: 1.67x to 2.50x)"
    )
