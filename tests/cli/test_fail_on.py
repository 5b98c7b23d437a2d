"""`fail_on`: a run whose layout is lost, or that is slower, fails as one that is wrong does."""

import json
import sys

import pytest

from prepare.app.cli import main as cli

NET = ("model._target_=sample_nets.small", "input.shape=[2,3,12,12]", "device=cpu")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("memfmt=channels_last",), ""),
        ((), "layout Contiguous: no step asks for channels-last"),
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


def test_another_word_is_refused(tmp_path, capsys):
    assert cli.run([*NET, "fail_on=[breaks,brakes]", f"hydra.run.dir={tmp_path}"]) == 2
    assert "'breaks'?" in capsys.readouterr().err


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
