"""Tests of sweeps: every row has a result, none affects another, and the table is complete."""

import json
import re
import shutil
import signal

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from prepare.app.cli import main as cli
from prepare.app.cli.hydra_app import slug
from prepare.app.job.record import Record
from prepare.app.sweep.summary import Summary, SweepRow, read_summary
from sweeps import Ended, finish, start, wait_for

UNET3D = ("model=unet3d", "model.width=2", "model.depth=2", "input.shape=[2,1,8,8,8]")


@pytest.fixture
def sweep(tmp_path, monkeypatch, capsys):
    """Run a sweep in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "swept"

    def run(*argv):
        with pytest.raises(SystemExit) as stop:
            cli.main(["--multirun", f"hydra.sweep.dir={folder}", "bench=none", *argv])
        out, err = capsys.readouterr()
        assert not GlobalHydra.instance().is_initialized()
        return Ended(stop.value.code, out, err, folder)

    return run


@pytest.mark.slow
def test_a_row_without_effect_is_not_a_failure(sweep):
    ran = sweep(*UNET3D, "memfmt=contiguous,channels_last,channels_last_3d")
    assert ran.code == 0, ran.err
    assert ran.statuses == ["ok", "no_effect", "ok"]
    assert [row["choices"]["memfmt"] for row in ran.rows] == [
        "contiguous",
        "channels_last",
        "channels_last_3d",
    ]
    assert [row["figures"].get("convolutions_converted") for row in ran.rows] == [0, None, 8]
    assert "memfmt=channels_last_3d" in ran.rows[1]["reason"]
    assert re.search(r"^#  memfmt +status .*converted  already  memory ", ran.out, re.MULTILINE)
    assert re.search(r"^0  contiguous +ok .* 0 +8  ", ran.out, re.MULTILINE)
    assert re.search(r"^1  channels_last +no_effect +- ", ran.out, re.MULTILINE)
    assert "#1: steps.conv2d_memory_format: " in ran.out
    assert "2 of 3" in ran.out


@pytest.mark.parametrize(
    "words",
    [
        ["model=unet3d", "memfmt=contiguous,chanels_last"],
        ["model=unet3d", "precision=half", "steps.half.dtype=bfloat16,bfloat15"],
        ["model=unet3d", "seed=0,1,x"],
    ],
)
def test_a_wrong_value_in_any_row_stops_the_sweep_at_its_start(sweep, tmp_path, words):
    ran = sweep(*words)
    assert ran.code == 2
    assert ran.out == ""
    assert len(ran.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_process_state_that_a_row_changes_is_restored(sweep):
    state = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    before = torch.get_rng_state()
    nets = [f"sample_nets.{name}" for name in ("reports_the_process", "changes_the_process")]
    said = []
    for names in (nets, nets[::-1]):
        ran = sweep(f"model._target_={','.join(names)}", "isolate=false")
        assert ran.statuses == ["ok", "ok"]
        said += [line for line in ran.out.splitlines() if line.startswith("process")]
        shutil.rmtree(ran.folder)
    assert said[0] == said[1]
    assert said[0].startswith("process (torch.float32, True, ")
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == state
    assert torch.equal(torch.get_rng_state(), before)


def test_the_exit_code_is_the_worst_of_all_rows():
    def code(*statuses):
        rows = [SweepRow(i, {}, status) for i, status in enumerate(statuses)]
        return Summary(rows, []).exit_code()

    assert code("ok", "no_effect", "skipped") == 0
    assert code("ok", "verification_failed") == 3
    for bad in ("failed", "crashed", "interrupted"):
        assert code("verification_failed", bad, "ok") == 1


def test_the_folder_name_of_a_row_is_short_and_flat():
    assert slug(["model=unet3d", "memfmt=by_rank"]) == "model=unet3d,memfmt=by_rank"
    assert slug(["model._target_=a/../b", "x='é y'"]) == "model._target_=a-..-b,x=-y"
    assert slug([]) == "defaults"
    assert len(slug([f"steps.half.keep=[{'a' * 300}]"])) == 100


def test_sigint_ends_a_sweep_at_once_and_leaves_files_whole(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time, pathlib\n"
        "def net():\n"
        "    pathlib.Path('began').write_text('x')\n"
        "    time.sleep(60)\n"
    )
    process = start("model._target_=slow.net", "seed=0,1", cwd=tmp_path)
    wait_for((tmp_path / "began").exists)
    process.send_signal(signal.SIGINT)
    ended = finish(process, tmp_path / "swept")
    assert ended.code == 130, ended.err
    assert "Traceback" not in ended.out + ended.err
    assert [row.status for row in read_summary(tmp_path / "swept").rows] == [
        "interrupted",
        "interrupted",
    ]
    assert Record(ended.file(0, "")).result() is not None
    assert (
        json.loads((tmp_path / "swept" / "summary.json").read_text())["format"] == "prepare.summary"
    )
