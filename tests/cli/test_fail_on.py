"""`fail_on`: a run whose layout is lost, or that is slower, fails as one that is wrong does."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import made
from prepare.app.cli import main as cli
from prepare.app.job.outcome import finished
from prepare.app.report.terminal.run import RunOutput
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


def results_of(found, *words):
    about = {"stopped": "", "figures": dict, "amp": "none", "unchanged": False}
    return SimpleNamespace(found=found, fail_on=words, **about)


def test_every_reason_of_a_failure_is_named(capsys, monkeypatch):
    verify, flow, bench = (
        made.verification(1, status="fail"),
        made.flow(2),
        made.bench(1.5, verdict="slower"),
    )
    found = {"verify": verify, "flow": flow, "bench": bench}
    both = finished(results_of({"flow": flow, "bench": bench}, "breaks", "slower"))
    assert both.result.reason == "fail_on=breaks, fail_on=slower"
    lost, slower = both.result.error.splitlines()
    assert "LOST at 2 places" in lost
    assert "1.5x slower" in slower
    wrong = finished(results_of(found, "slower"))
    assert wrong.result.reason.endswith(", fail_on=slower")
    assert (wrong.result.status, wrong.code) == ("verification_failed", 3)
    assert wrong.result.error == f"{verify.reason}\n{slower}"
    monkeypatch.setattr(RunOutput, "_show_rest", lambda *_: None)
    RunOutput(Path()).end(both)
    assert capsys.readouterr().err.splitlines() == [
        f"fail_on=breaks: {lost}",
        f"fail_on=slower: {slower}",
    ]
