"""The code to paste, on a page and in the terminal: it runs for the recipe beside it."""

import html
import re
from dataclasses import replace

import pytest
import torch

import made
from coder_nets import Coder
from prepare.app.cli import main as cli
from prepare.app.job.record import Job, Results
from prepare.app.job.run_stages import must_format
from prepare.app.report.answers import one_line, training_code
from prepare.pipeline import Pipeline
from sample_nets import wrong_in_training

RUN = Results(job=Job(None, None, [], {}), plan={}, recipe="")
TRAINING = replace(RUN, job=Job(None, None, ["mode=train"], {}))
WRONG = ("model._target_=sample_nets.wrong_in_training", "memfmt=channels_last")
SMALL = ("input.shape=[1,3,16,16]", "bench=none", "verify=none", "flow=none")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::prepare.errors.KnownIssueWarning")
@pytest.mark.parametrize("words", [[], ["+steps.repair_layout={}"], ["precision=half"]], ids=str)
def test_the_code_of_a_page_runs_for_a_model_in_training_mode(words, tmp_path, monkeypatch):
    assert cli.run([*WRONG, *SMALL, *words, f"hydra.run.dir={tmp_path}"]) == 0
    monkeypatch.chdir(tmp_path)
    code = training_code(made.read_run(tmp_path))
    page = (tmp_path / "report.html").read_text().replace("&#34;", '"')
    assert code in page
    model = wrong_in_training().train()
    names = {"model": model, "batch": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        exec(code, names)
    assert names["model"] is model
    assert ("steps={'repair_layout': {}})" in code) == (not words)
    assert model.training == (words == ["+steps.repair_layout={}"])


def test_the_code_of_a_job_under_autocast_runs_its_forward_in_one():
    names = {"model": torch.nn.Linear(2, 2), "batch": torch.ones(1, 2)}
    code = training_code(replace(RUN, amp="bfloat16"))
    assert 'torch.autocast("cpu", torch.bfloat16)' in code
    lines = [line for line in code.splitlines() if "Pipeline" not in line and "apply" not in line]
    exec("\n".join(lines).replace("pipeline.format(batch)", "batch"), names)
    assert names["output"].dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore::prepare.errors.KnownIssueWarning")
@pytest.mark.parametrize("words", [["precision=bfloat16"], ["amp=bfloat16"]], ids=str)
def test_pasted_code_runs_the_method_on_a_float32_batch(words, tmp_path, monkeypatch):
    of_coder = ("model._target_=coder_nets.Coder", "model.method=decode", "memfmt=channels_last_3d")
    small = ("input.shape=[1,8,3,6,7]", *SMALL[1:], f"hydra.run.dir={tmp_path}")
    assert cli.run([*of_coder, *words, *small]) == 0
    monkeypatch.chdir(tmp_path)
    page = html.unescape((tmp_path / "report.html").read_text())
    (code,) = re.findall(
        r"(?:import torch\n)?from prepare.pipeline import.*?batch\)\)", page, re.DOTALL
    )
    formats = must_format(Pipeline.load("recipe.yaml"))
    assert formats == ("precision=bfloat16" in words)
    one = one_line(replace(made.read_run(tmp_path), formats=formats))
    assert one.startswith("pipeline = ")
    for text in (code, one.replace("model.decode", "output = model.decode")):
        names = {"model": Coder(), "batch": torch.randn(1, 8, 3, 6, 7), "Pipeline": Pipeline}
        with torch.no_grad():
            exec(text, names)
        is_half = formats or (bool(words) and text is code)
        (output,) = names["output"]  # of decode, where forward returns a tensor
        assert output.dtype is (torch.bfloat16 if is_half else torch.float32)


@pytest.mark.parametrize("amp", ["none", "bfloat16", "float16"])
def test_the_code_of_a_training_run_trains(amp, monkeypatch):
    code = training_code(replace(TRAINING, amp=amp))
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = []

    class Loaded:
        def apply(self, model, *, optimizer):
            given.append(optimizer)
            return model

        def format(self, batch):
            return batch

    monkeypatch.setattr(Pipeline, "load", lambda path: Loaded())
    loader = [(torch.ones(3, 2), torch.zeros(3, 2))]
    names = {"model": model, "optimizer": optimizer, "criterion": torch.nn.MSELoss()}
    exec(code, names | {"loader": loader})
    assert given == [optimizer]
    assert not torch.equal(model.weight, before)
    assert ("GradScaler" in code) == (amp == "float16")
    assert ("autocast" in code) == (amp != "none")
    assert "optimizer=optimizer" in one_line(TRAINING)
