"""The answer for scripts: one JSON object on stdout, and nothing with `--quiet`."""

import json
from pathlib import Path

import pytest

from prepare.app.cli import main as cli

NET = ("model._target_=sample_nets.Net", "input.shape=[2,3,16,16]", "bench=none")


def answer(capsys, *words):
    code = cli.run([*words])
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["code"] == code
    return found


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_job_gives_status_figures_and_files(capsys):
    found = answer(capsys, *NET, "memfmt=channels_last", "--json")
    assert (found["status"], found["reason"], found["error"]) == ("ok", None, None)
    assert found["figures"]["convolutions_converted"] == 1
    assert found["figures"]["verified"] == "pass"
    assert found["figures"]["layout_breaks"] == 0
    result = json.loads(Path(found["files"]["result.json"]).read_text())
    assert result["figures"] == found["figures"]


@pytest.mark.parametrize("task", ["plan", "flow"])
def test_the_other_tasks_answer_too(capsys, task):
    assert answer(capsys, *NET, f"task={task}", "--json", "--quiet")["status"] == "ok"


def test_a_wrong_configuration_is_an_object_with_the_error(capsys):
    found = answer(capsys, *NET, "memfmt=chanels_last", "--json")
    assert (found["status"], found["reason"], found["code"]) == ("failed", "configuration", 2)
    assert "did you mean" in found["error"]


def test_a_command_answers_too(capsys):
    assert "half" in answer(capsys, "steps", "--json")["steps"]


def test_quiet_prints_nothing_for_a_job_without_warnings(capsys):
    assert cli.run([*NET, "memfmt=channels_last", "verify=none", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
