"""The task flow: it prepares nothing, and follows the model as the declared steps would leave it."""

import pytest
import torch

from prepare.app.cli import main as cli
from prepare.stages.flow import Flow

MODEL = (
    "model=unet2d",
    "model.norm=instance",
    "model.width=8",
    "model.depth=2",
    "verify=none",
    "bench=none",
)


def flow_of(folder, *words) -> Flow:
    with pytest.raises(SystemExit) as ended:
        cli.main([*MODEL, f"hydra.run.dir={folder}", *words])
    assert ended.value.code == 0
    return Flow.load(folder / "flow.json")


@pytest.mark.parametrize("level", ["predict", "observe"])
def test_the_task_follows_the_model_with_the_steps_of_a_run(level, tmp_path, capsys):
    words = ("memfmt=channels_last", f"flow={level}")
    flow = flow_of(tmp_path / "task", "task=flow", *words)
    assert flow.summary["breaks"] > 0
    assert flow == flow_of(tmp_path / "run", *words)
    out = " ".join(capsys.readouterr().out.split())
    assert "looked at only" in out


def test_the_task_shows_what_repairs_would_bring(tmp_path, capsys):
    words = ("memfmt=channels_last", "+steps.repair_layout={}")
    flow = flow_of(tmp_path, "task=flow", *words, "+steps.compile={backend: eager}")
    before = Flow.load(tmp_path / "flow_before.json")
    assert flow.summary["breaks"] < before.summary["breaks"]
    assert "compile: not" in " ".join(capsys.readouterr().out.split())


def test_the_task_predicts_for_a_gpu_that_is_not_here(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("predicted for a GPU that is not here")
    words = ("model.norm=batch", "model.depth=4", "memfmt=channels_last", "device=cuda")
    assert flow_of(tmp_path, "task=flow", *words).device == "cuda"
