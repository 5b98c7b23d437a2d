"""The logger `prepare`: what it reports at each level, and that it prints nothing by itself."""

import logging

from torch import nn

from prepare.app.cli.main import run
from prepare.pipeline import Pipeline


def test_apply_logs_what_it_moved(caplog):
    caplog.set_level(logging.INFO, "prepare")
    pipeline = Pipeline.from_config({"half": {}})
    model = pipeline.apply(nn.Sequential(nn.Conv2d(2, 2, 3)))
    pipeline.apply(model)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("Sequential: half: moved 2 tensors, ")
    assert second.startswith("Sequential: half: nothing to do, ")


def logged(folder, *words):
    """Return the lines of the log of a run, without their times."""
    small = ["model=unet2d", "model.width=2", "model.depth=1", "memfmt=channels_last", "task=plan"]
    assert run([*small, f"hydra.run.dir={folder}", *words]) == 0
    return [line.partition("][")[2] for line in (folder / "prepare.log").read_text().splitlines()]


def test_a_run_logs_its_stages_and_its_end(tmp_path):
    lines = logged(tmp_path)
    assert "prepare.app.job.execute][INFO] - planning" in lines
    assert lines[-1].startswith("prepare.app.job.execute][INFO] - ok after ")
    assert lines[-1].endswith(f", in {tmp_path}")
    assert not [line for line in lines if "DEBUG" in line]


def test_jobs_of_a_sweep_log_in_their_own_folders(tmp_path):
    words = ["model=unet2d", "model.width=2", "model.depth=1", "task=plan", "seed=1,2"]
    for isolate in ("true", "false"):
        swept = tmp_path / isolate
        more = [f"isolate={isolate}", f"hydra.sweep.dir={swept}", "hydra.verbose=prepare"]
        assert run(["-m", *words, *more]) == 0
        logs = [path.read_text() for path in sorted(swept.glob("*/prepare.log"))]
        assert len(logs) == 2
        for text in logs:
            assert text.count("planning\n") == 1
            assert "][DEBUG] - " in text
            assert "[hydra." not in text
