"""A job shows what it has done as soon as it is known, and keeps it if it is stopped."""

import json
from dataclasses import replace

import pytest
from torch import nn

import made
import sample_nets
from paths import RUN
from prepare.app.cli import main as cli
from prepare.app.job.run_stages import _memfmt_note
from prepare.app.report.answers import stage_documents, verdict
from prepare.core.document import Answer, Document, ReportContext
from prepare.core.utils.wording import command_line_words
from prepare.pipeline import Pipeline
from prepare.stages.registry import STAGES
from prepare.stages.verify.document import verify_document

CONF = RUN.parent / "conf"
ANSWERS = ["layout", "right", "faster", "next", "details"]
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


@pytest.mark.parametrize("stage", ["flow", "verify"])
def test_what_was_prepared_is_printed_before_it_is_examined(go, monkeypatch, capsys, stage):
    seen = []

    def look(*_, **__):
        seen.append(capsys.readouterr().out)
        return {}

    monkeypatch.setattr(STAGES[stage], "run", look)
    go("memfmt=channels_last", "bench=none", "verify=short", "flow=predict")
    assert "2 of 2" in seen[0]
    assert "details" not in seen[0]


def test_a_run_without_memfmt_says_so(go):
    _, said = go("verify=none", "bench=none", "precision=bfloat16")
    assert "choose memfmt=channels_last" in said.out
    _, said = go("verify=none", "bench=none", "precision=bfloat16", "memfmt=contiguous")
    assert "no memfmt" not in said.out


@pytest.mark.parametrize("ranks", [(2,), (3,), (2, 3)])
def test_the_memfmt_that_a_note_names_exists(ranks):
    kinds = {2: nn.Conv2d, 3: nn.Conv3d}
    (note,) = _memfmt_note(nn.Sequential(*(kinds[rank](1, 1, 1) for rank in ranks)), Pipeline([]))
    assert (CONF / "memfmt" / f"{note.rpartition('=')[2]}.yaml").is_file()


def test_a_stage_that_chose_the_recipe_needs_no_note_on_formats(go, monkeypatch):
    monkeypatch.setattr(STAGES["verify"], "choose", lambda self, work: None)
    assert "no memfmt" not in go("verify=none", "bench=none")[1].out


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
    said = verdict(saved, stage_documents(saved))
    assert said.startswith("Unchanged. Speed not measured.")


def test_the_answers_stand_in_the_first_lines(go):
    words = ("flow=predict", "verify=short", "bench=short", "bench.seconds=0.2")
    _, said = go("memfmt=channels_last", *words)
    title, *rows = said.out.splitlines()
    assert len(rows) < 10
    assert title == "Sequential on cpu, channels_last: 2 of 2 convolutions converted"
    labels = [row[2:10].strip() for row in rows]
    assert [label for label in labels if label not in ("", "note")] == ANSWERS


MEASURED = ("memfmt=channels_last", "flow=predict", "verify=short")


def test_what_to_do_is_the_line_that_applies_the_recipe(go, monkeypatch):
    monkeypatch.setattr(STAGES["bench"], "run", lambda *_: {"bench": made.bench()})
    _, said = go(*MEASURED)
    (line,) = (line for line in said.out.splitlines() if "  next  " in line)
    call, _, rest = line.partition("next")[2].strip().partition(", with ")
    assert "/" not in call + rest  # the line with the page has the path
    model = sample_nets.small()
    monkeypatch.chdir("run")
    assert eval(call, {"Pipeline": Pipeline, "model": model}) is model
    assert model[0].weight.stride()[1] == 1


@pytest.mark.parametrize(
    ("verdict", "advised"),
    [
        ("unclear", "time it longer with bench=full, best on an idle machine"),
        ("slower", "leave the model unprepared; it is slower"),
    ],
)
def test_what_to_do_joins_its_parts_without_a_colon(go, monkeypatch, verdict, advised):
    monkeypatch.setattr(
        STAGES["bench"], "run", lambda *_: {"bench": made.bench(1.2, verdict=verdict)}
    )
    _, said = go(*MEASURED)
    assert f"  next      {advised}\n" in said.out


def test_an_answer_waits_for_those_before_it():
    from prepare.app.report.terminal import answer_rows

    def rows(*questions, ended=False):
        answers = [Answer(question=each, kind="good", answer="Yes") for each in questions]
        documents = [Document(name=each.question, title="t", answers=(each,)) for each in answers]
        return [label for label, _ in answer_rows(documents, ended=ended)]

    assert rows("Right", "Faster") == []
    assert rows("Exported", "Layout") == ["layout"]
    assert rows("Right", "Faster", "Layout") == ["layout", "right", "faster"]
    assert rows("Exported", "Faster", "Right", ended=True) == ["right", "faster", "exported"]


def test_the_path_of_a_run_stands_once_and_is_not_broken(go, monkeypatch):
    monkeypatch.delenv("COLUMNS")
    folder = "a" * 90
    monkeypatch.setattr(STAGES["bench"], "run", lambda *_: {"bench": made.bench()})
    _, said = go(*MEASURED, f"hydra.run.dir={folder}")
    assert said.out.count(folder) == 1
    assert f"{folder}/report.html\n" in said.out
    assert len(said.out.splitlines()) <= 10


def test_an_input_step_that_changes_the_example_is_verified(go):
    _, said = go("+steps.input_format={memory_format:channels_last}", "bench=none")
    assert "right     yes" in said.out


OF_CODER = ("model._target_=coder_nets.Coder", "bench=none")


def test_what_to_do_is_made_from_the_model_and_does_not_fail(go):
    _, said = go(*OF_CODER, "input.shape=null")
    word = "memfmt=channels_last_3d"
    assert f"as in {word}" in said.out
    _, said = go(*OF_CODER, "input.shape=null", word)
    assert "as in input.shape=[2,3,64,64,64]" in said.out


def test_convolutions_that_a_method_does_not_call_are_counted(go):
    words = ("flow=predict", "memfmt=channels_last_3d", "input.shape=[2,3,8,8,8]")
    _, said = go(*OF_CODER, "verify=none", "model.method=encode", *words)
    assert "1 is not called by encode" in said.out


@pytest.mark.parametrize(("word", "other"), [("precision=bfloat16", "float32"), ("amp=bfloat16", "amp=none")])  # fmt: skip
def test_gradients_in_bfloat16_name_the_run_that_judges_them(word, other):
    amp = "bfloat16" if word.startswith("amp") else "none"
    found = made.verification()
    kind = {"dtype": "bfloat16", "what": "input gradients", "sensitivity": 0.9}
    checks = (replace(found.checks[0], **kind),)
    found = replace(found, mode="train", amp=amp, checks=checks)
    with command_line_words():
        document = verify_document(ReportContext(found={"verify": found}))
    assert document.answers[0].kind == "warn"
    assert other in document.answers[0].line
    assert other in document.advice[0].answer
