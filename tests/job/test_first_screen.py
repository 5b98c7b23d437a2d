"""The first screen of a run: ten lines in words of the field, what to do next, and the page that repeats it."""

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest

import made
from page_reader import Reader
from prepare.app.cli import hydra_app
from prepare.app.cli import main as cli
from prepare.app.job.execute import Outcome
from prepare.app.job.record import Job, Result, Results
from prepare.app.report.terminal import RunOutput
from prepare.core.document import ReportContext
from prepare.stages.stage import STAGES
from prepare.stages.verify.document import verify_document

NET = ("model._target_=sample_nets.small", "input.shape=[2,3,12,12]", "device=cpu")
CODER = ("model._target_=coder_nets.Coder", "device=cpu", "verify=none", "bench=none")
DEEP = ("memfmt=channels_last_3d", "input.shape=[2,3,8,8,8]")


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Run a job in an empty folder as `prepare` does, where nobody sets a width; return what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.argv", ["/bin/prepare"])
    monkeypatch.setattr(STAGES["bench"], "run", lambda *_: {"bench": made.bench()})

    def run(*words):
        assert cli.run(list(words)) == 0
        return capsys.readouterr()

    return run


def test_it_has_ten_lines_one_path_and_no_variable(go, monkeypatch, tmp_path):
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    said = go(*NET, "memfmt=channels_last", f"hydra.run.dir={'a' * 90}")
    assert (len(said.out.splitlines()) <= 10, said.err) == (True, "")
    assert said.out.count("a" * 90) == 1
    assert f"{'a' * 90}/report.html\n" in said.out
    assert "SPINCOUNT" not in said.out
    answers = ["layout", "right", "faster", "next", "details"]
    assert re.findall(r"(?m)^  (\w+) ", said.out) == answers
    page = Reader((tmp_path / ("a" * 90) / "report.html").read_text()).text
    assert "On the command line: prepare model._target_=sample_nets.small 'input.shape=" in page


def test_a_note_that_does_not_fit_into_ten_lines_is_on_the_page(capsys, tmp_path):
    found = {"flow": made.flow(0), "verify": made.verification(), "bench": made.bench()}
    job = Job(None, None, [], {}, seen={"given": ""})
    run = Results(job=job, audit=made.audit(), found=found, notes=["a long note " * 60, "another"])
    RunOutput(tmp_path).end(Outcome(Result("ok"), 0, run))
    out = capsys.readouterr().out
    assert (len(out.splitlines()) <= 10, "2 notes on the page" in out) == (True, True)


def test_its_folder_is_named_by_the_day_the_time_and_the_model(go):
    said = go("model=unet3d", "task=plan")
    assert re.search(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-unet3d/report.html\n", said.out)


def test_how_long_it_may_take_stands_in_the_spinner_alone(go, monkeypatch):
    shown = []

    @contextmanager
    def spinner(what):
        shown.append(what)
        yield lambda _: None

    monkeypatch.setattr(hydra_app, "stage", spinner)
    said = go(*NET, "memfmt=channels_last")
    assert any("; up to " in what for what in shown)
    assert "up to " not in said.out + said.err


def test_what_to_do_is_made_from_the_model_and_does_not_fail(go):
    assert "as in memfmt=channels_last_3d" in go(*CODER, "hydra.run.dir=a").out
    given = "as in input.shape=[2,3,64,64,64]\n"
    assert given in go(*CODER, DEEP[0], "hydra.run.dir=b").out


def test_convolutions_that_do_not_run_as_one_are_said_to_be_elsewhere(go):
    said = go(*CODER, *DEEP, "model.method=encode", "hydra.run.dir=a")
    assert "1 is not called by encode" in " ".join(said.out.split())
    head = ("+model.in_channels=3", "+model.out_channels=4", "+model.kernel_size=1")
    words = ("model._target_=torch.nn.Conv3d", *head, *CODER[1:], *DEEP, "+steps.repair_layout={}")
    assert "1 runs as a matrix product" in " ".join(go(*words, "hydra.run.dir=b").out.split())


def test_who_serves_a_model_gets_no_warning_of_training(go):
    words = ("model._target_=sample_nets.wrong_in_training", "memfmt=channels_last", "device=cpu")
    assert go(*words, "input.shape=[1,3,16,16]").err == ""


@pytest.mark.parametrize(("amp", "once"), [("none", "precision=float32"), ("bfloat16", "amp=none")])
def test_gradients_in_bfloat16_name_the_run_that_judges_them(amp, once):
    found = made.verification()
    checks = (replace(found.checks[0], what="input gradients", sensitivity=0.9),)
    found = replace(found, mode="train", amp=amp, dtype="bfloat16", checks=checks)
    document = verify_document(ReportContext(found={"verify": found}))
    assert document.answers[0].line.startswith("outputs right; gradients cannot be judged")
    assert once in document.answers[0].line
    assert once in document.advice[0].answer
