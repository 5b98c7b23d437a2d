"""The command task=reduce, and the page of a failed verification."""

import pytest

from prepare.app.cli.main import run
from prepare.app.job.record import Job
from prepare.app.report.pages.page import run_page
from prepare.core.document import Code, ReportContext
from prepare.stages.reduce import ModuleCall, Reduction
from prepare.stages.verify.records import Verification
from prepare.stages.verify.stage import VerifyStage

NET = ("model=unet2d", "model.width=4", "model.depth=2", "device=cpu", "input.shape=[1,1,16,16]")
CALL = ModuleCall(name="stem", kind="SiLU", arguments=(), options=(), shape=(1, 2))
FOUND = Reduction(fault="wrong", module="stem", call=CALL, script="x = 1\n", text="error 2")


@pytest.mark.parametrize(
    "found", [FOUND, pytest.param(None, marks=pytest.mark.slow)], ids=["found", "nothing"]
)
def test_task_reduce_writes_the_script_and_says_where(found, tmp_path, capsys, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "prepare.stages.reduce.reduce", lambda *_, **given: asked.update(given) or found
    )
    words = (*NET, "memfmt=channels_last", "task=reduce", f"hydra.run.dir={tmp_path}", "mode=train")
    assert run([*words, "verify.seconds=20"]) == 0
    assert (asked["training"], asked["seconds"]) == (True, 20.0)
    out = capsys.readouterr().out
    if found is None:
        assert "no module of torch is wrong by itself" in " ".join(out.split())
        return
    out = " ".join(out.split())
    shows = "with torch alone, shows stem: nn.SiLU error 2 (not in the table of known issues)"
    # A path that is wider than the terminal is broken.
    assert f"script {tmp_path / 'reduced.py'}, {shows}".replace(" ", "") in out.replace(" ", "")
    assert (tmp_path / "reduced.py").read_text() == "x = 1\n"


def test_task_reduce_needs_an_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model._target_=torch.nn.Conv2d", "+model.in_channels=3", "+model.out_channels=4"]
    words += ["+model.kernel_size=3", "memfmt=channels_last", "device=cpu"]
    assert run([*words, "task=reduce"]) == 2
    assert "input: task=reduce needs an example input" in capsys.readouterr().err


FAILED = Verification(status="fail", reason="outputs: 1 is off", level="short", mode="train",
                      reference="float64", checks=(), lost=(), culprit="1", advice="", seconds=1.0)  # fmt: skip


def test_the_page_of_a_failed_verification_has_the_command():
    job = Job(None, None, ["model=unet2d", "task=prepare", "hydra.run.dir=x"], {})
    document = VerifyStage.document(
        ReportContext(found={"verify": FAILED}, overrides=tuple(job.overrides))
    )
    commands = [part.text for part in document.parts() if isinstance(part, Code)]
    assert commands == ["python run.py model=unet2d task=reduce"]
    without = VerifyStage.document(ReportContext(found={"verify": FAILED})).parts()
    assert not any(isinstance(part, Code) for part in without)


def test_the_page_of_a_failed_verification_has_the_script(tmp_path):
    FAILED.save(tmp_path / "verify.json")
    (tmp_path / "reduced.py").write_text("import torch\nmodule = nn.SiLU()\n")
    text = run_page(tmp_path)
    assert "import torch\nmodule = nn.SiLU()<" in text
    assert "A script that needs torch alone shows the fault" in text
