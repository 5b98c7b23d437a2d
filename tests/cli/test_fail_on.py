"""`fail_on`: a run whose layout is lost, or that is slower, fails as one that is wrong does."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import made
from page_reader import Reader
from prepare.app.cli import main as cli
from prepare.app.job.execute import finished
from prepare.app.report.terminal import RunOutput
from prepare.stages.registry import STAGES

NET = ("model._target_=sample_nets.small", "input.shape=[2,3,12,12]", "device=cpu")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("memfmt=channels_last",), ""),
        ((), "layout Contiguous: channels-last was not requested"),
        (("memfmt=channels_last", "flow=none"), "layout not measured, without an example input"),
    ],
)
def test_a_layout_that_is_not_kept_fails_the_run(words, wrong, tmp_path, capsys):
    run = (*NET, *words, "verify=none", "bench=none", f"hydra.run.dir={tmp_path}", "fail_on=breaks")
    assert cli.run(list(run)) == (3 if wrong else 0)
    said, result = capsys.readouterr(), json.loads((tmp_path / "result.json").read_text())
    assert ("fail_on=breaks: " in said.err) is bool(wrong)
    assert wrong in said.err
    assert result["status"] == ("verification_failed" if wrong else "ok")
    assert result["reason"] == ("fail_on=breaks" if wrong else None)


def test_a_lost_layout_and_a_slower_model_have_a_reason():
    breaks, slower = STAGES["flow"].failure, STAGES["bench"].failure
    assert breaks("breaks", {"flow": made.flow(13)}).startswith("layout LOST at 13 places (13 ")
    assert slower("slower", {"bench": made.bench(1.5, verdict="slower")}).startswith(
        "inference 1.5x slower, "
    )
    assert slower("slower", {"bench": made.bench(0.5)}) == slower("slower", {}) == ""


def test_another_word_is_refused(tmp_path, capsys):
    assert cli.run([*NET, "fail_on=[breaks,brakes]", f"hydra.run.dir={tmp_path}"]) == 2
    assert "'breaks'?" in capsys.readouterr().err


def results_of(found):
    about = {"stopped": "", "figures": dict, "amp": "none", "unchanged": False, "notes": []}
    return SimpleNamespace(found=found, **about)


def test_every_reason_of_a_failure_is_named(capsys, monkeypatch):
    verify, flow = made.verification(1, status="fail"), made.flow(2)
    bench = made.bench(1.5, verdict="slower")
    found = {"verify": verify, "flow": flow, "bench": bench}
    both = finished(results_of({"flow": flow, "bench": bench}), ["breaks", "slower"])
    assert both.result.reason == "fail_on=breaks, fail_on=slower"
    lost, slower = both.result.error.splitlines()
    assert "LOST at 2 places" in lost
    assert "1.5x slower" in slower
    wrong = finished(results_of(found), ["slower"])
    assert wrong.result.reason.endswith(", fail_on=slower")
    assert (wrong.result.status, wrong.code) == ("verification_failed", 3)
    assert wrong.result.error == f"{verify.reason}\n{slower}"
    monkeypatch.setattr(RunOutput, "_show_rest", lambda *_: None)
    RunOutput(Path()).end(both)
    assert capsys.readouterr().err.splitlines() == [
        f"fail_on=breaks: {lost}",
        f"fail_on=slower: {slower}",
    ]


LOSING = """
from torch import nn

class Net(nn.Module):
    def __init__(self, x=0):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.last(self.first(x).contiguous())
"""
LINE = "losing_net.py:10"


@pytest.fixture
def lost(tmp_path, monkeypatch, capsys):
    """Check a network that loses its layout in one line; return what was said, and the folder."""
    (tmp_path / "losing_net.py").write_text(LOSING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")

    def check(*words, code=3):
        net = ("model._target_=losing_net.Net", "input.shape=[1,3,16,16]", "device=cpu")
        folder = tmp_path / "run"
        run = (*net, "memfmt=channels_last", f"hydra.run.dir={folder}", "overwrite=true", *words)
        assert cli.run(list(run)) == code
        said = capsys.readouterr()
        return said.out + said.err, folder

    yield check
    sys.modules.pop("losing_net", None)


def shown(folder: Path) -> str:
    """Return the text of a page."""
    texts = Reader((folder / "report.html").read_text()).texts
    return " ".join(text for tag, text in texts if tag not in ("style", "script"))


@pytest.mark.parametrize("words", [("task=flow",), ("verify=none", "bench=none")])
def test_the_page_of_a_failed_check_says_what_the_terminal_says(lost, words):
    said, folder = lost("fail_on=breaks", *words)
    (advised,) = (row.split(None, 1)[1] for row in said.splitlines() if row.startswith("  next "))
    page = shown(folder)
    assert f"Lost at {LINE}" in page
    assert "Layout lost at 1 place" in page
    assert f"{advised[0].upper()}{advised[1:]}" in page
    assert "+steps.keep_layout={}" in advised
    wrong = ("erification failed", "raceback", "went wrong", "Fail on")
    assert [word for word in wrong if word in page or word in said] == []


def test_the_terminal_and_the_record_name_the_line_that_loses_it(lost):
    said, folder = lost("fail_on=breaks", "task=flow")
    answer, reason = (row for row in said.splitlines() if LINE in row)
    assert answer.split()[0] == "layout"
    assert reason.startswith("fail_on=breaks: ")
    result = json.loads((folder / "result.json").read_text())
    assert LINE in result["error"]
    assert (result["reason"], result["traceback"]) == ("fail_on=breaks", None)


def test_the_step_that_is_advised_ends_the_failure(lost):
    said, _ = lost("fail_on=breaks", "task=flow", "+steps.keep_layout={}", code=0)
    assert LINE not in said


def test_a_flow_plans_as_many_changes_as_a_plan(lost):
    planned, folder = lost("task=plan", code=0)
    counts = json.loads((folder / "plan.json").read_text())["summary"]
    changes = f"{counts['to_change']} of {counts['tensors']} tensors would change"
    assert counts["to_change"] == 2
    assert changes in planned
    _, folder = lost("task=flow", "fail_on=breaks")
    assert json.loads((folder / "plan.json").read_text())["summary"] == counts
    assert changes in shown(folder)


def test_a_sweep_says_that_a_check_failed(lost, tmp_path):
    words = ("--multirun", "+model.x=1,2", "fail_on=breaks", "task=flow")
    said, _ = lost(*words, f"hydra.sweep.dir={tmp_path / 'swept'}")
    assert "failed a check" in said
    assert "erification failed" not in said + shown(tmp_path / "swept")
