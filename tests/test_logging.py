"""The logger `prepare`: what it reports at each level, and that it prints nothing by itself."""

import logging
import subprocess
import sys

from torch import nn

from prepare.cli.main import run
from prepare.pipeline import Pipeline


def test_apply_logs_what_it_moved(caplog):
    caplog.set_level(logging.INFO, "prepare")
    pipeline = Pipeline.from_config({"half": {}})
    model = pipeline.apply(nn.Sequential(nn.Conv2d(2, 2, 3)))
    pipeline.apply(model)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("Sequential: half: moved 2 tensors, ")
    assert second.startswith("Sequential: half: nothing to do, ")


def test_debug_names_every_tensor_and_module(caplog):
    caplog.set_level(logging.DEBUG, "prepare")
    steps = {"eval_mode": {}, "half": {}}
    Pipeline.from_config(steps).apply(nn.Sequential(nn.Conv2d(2, 2, 3)))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert said == ["eval_mode: the model, 0", "transfer: 0.weight, 0.bias"]


def test_a_job_logs_its_stages_and_its_end(caplog, tmp_path):
    caplog.set_level(logging.INFO, "prepare")
    words = ["model=unet2d", "model.width=2", "model.depth=1", "memfmt=channels_last"]
    assert run([*words, "task=plan", f"hydra.run.dir={tmp_path}"]) == 0
    said = [record.getMessage() for record in caplog.records]
    assert "planning" in said
    assert said[-1].startswith("ok after ")
    assert said[-1].endswith(f", in {tmp_path}")


def test_without_a_handler_nothing_is_printed():
    code = "import logging, prepare; logging.getLogger('prepare.job').error('text')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
