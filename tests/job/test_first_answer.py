"""A job shows what it has done as soon as it is known, and keeps it if it is stopped."""

import json

import pytest

import made
from prepare.app.cli import main as cli
from prepare.app.report.answers import answers, stage_documents
from prepare.stages.stage import STAGES

QUICK = ("model._target_=sample_nets.small", "input.shape=[2,3,12,12]", "device=cpu", "flow=none")


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Run a job in an empty folder, in this process; return its folder and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv, code=0):
        assert cli.run([*QUICK, "hydra.run.dir=run", "overwrite=true", *argv]) == code
        return tmp_path / "run", capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("stage", "missing", "absent"),
    [("verify", "verification and timing", "verify.json"), ("bench", "timing", "bench.json")],
)
def test_a_stopped_job_leaves_a_complete_record(go, monkeypatch, stage, missing, absent):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(STAGES[stage], "run", stop)
    folder, said = go("memfmt=channels_last", code=130)
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["error"]) == (
        "interrupted",
        f"stopped by Ctrl-C; not done: {missing}",
    )
    names = {path.name for path in folder.iterdir()}
    assert {"audit.json", "recipe.yaml", "report.html"} <= names
    assert absent not in names
    assert "2 of 2" in said.out
    assert f"not done: {missing}" in said.err


_SO_ALREADY = ("model._target_=sample_nets.small_channels_last", "memfmt=channels_last")


@pytest.mark.parametrize("words", [(), ("memfmt=contiguous",), _SO_ALREADY])
def test_a_run_that_changes_nothing_is_not_verified_or_timed(go, words):
    folder, said = go(*words)
    assert "unchanged: nothing" in said.out
    assert ("-m memfmt=contiguous,channels_last" in said.out) is bool(words)
    assert ("as before" in said.out) is (not words)
    assert ("as in memfmt=channels_last" in said.out) is (not words)
    assert "note" not in said.out
    assert json.loads((folder / "result.json").read_text())["reason"] == "nothing changed"
    assert not {"verify.json", "bench.json"} & {path.name for path in folder.iterdir()}
    saved = made.read_run(folder)
    said = [each.answer for each in answers(saved, stage_documents(saved))]
    assert {"Unchanged", "Not measured"} <= {*said}
