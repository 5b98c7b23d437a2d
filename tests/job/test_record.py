"""A run's folder: what is written is read again, and any other file is refused in one line."""

import json

import pytest
import torch
from torch import nn

from made import comparison
from prepare import recipe
from prepare.app.job.record import STATUSES, Analyses, Job, Record, Result, Results, files_in
from prepare.audit import Audit, audit
from prepare.errors import FileError
from prepare.pipeline import Pipeline

ALL_OF_IT = Result("failed", "model", "a line\nand another", "Traceback ...", 1.25)


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path / "run")
    record.clear()
    return record


def test_a_result_is_read_as_it_was_written(record):
    for result in (Result("ok"), ALL_OF_IT, Result("ok", seconds=0.5, error="\udc80 [red] é\n")):
        record.write_result(result)
        assert record.result() == result


def test_a_result_holds_exactly_the_keys_that_others_may_rely_on(record):
    record.write_result(ALL_OF_IT)
    data = json.loads((record.folder / "result.json").read_text())
    assert list(data) == [
        "format",
        "version",
        "status",
        "reason",
        "error",
        "traceback",
        "seconds",
        "figures",
        "done",
        "during",
        "amp",
        "notes",
        "problems",
        "place",
    ]
    assert (data["format"], data["version"]) == ("prepare.result", 1)
    assert data["status"] in STATUSES


def test_a_job_is_read_as_it_was_written(record):
    job = Job(
        3, "abc", ["memfmt=by_rank"], {"memfmt": "by_rank", "input": None}, seen={"given": "x"}
    )
    record.write_job(job)
    assert record.job() == job


def test_an_empty_folder_has_neither(record):
    assert (record.result(), record.job()) == (None, None)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", '{"format": "prepare.result"}', '{"format": "prepare.audit", "version": 1}',
        '{"format": "prepare.result", "version": 2, "status": "ok"}', "[" * 100_000,
        '{"format": "prepare.result", "version": 1, "status": "ok", "other": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_result_is_an_error_naming_it(record, text):
    (record.folder / "result.json").write_text(text)
    with pytest.raises(FileError, match=r"result\.json: (this is |version 2)"):
        record.result()


def test_beginning_again_removes_only_files_of_earlier_runs(record):
    for name in (*files_in(), "mine.txt"):
        (record.folder / name).write_text("x")
    record.clear()
    assert [path.name for path in record.folder.iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError) as caught:
        Record(tmp_path / "file" / "run").clear()
    assert ": Not a directory" in str(caught.value)


def test_everything_but_the_environment_is_the_same_in_two_records(tmp_path):
    folders = []
    for name in "ab":
        torch.manual_seed(0)
        model, pipeline = nn.Conv2d(3, 4, 3), Pipeline.from_config({"conv2d_memory_format": {}})
        plan = pipeline.plan(model)
        record = Record(tmp_path / name)
        record.clear()
        audited = audit(pipeline.apply(model), plan=plan)
        text = recipe.dumps(pipeline.to_recipe())
        job = Job(None, None, [], {})
        record.write_results(Results(job=job, audit=audited, plan=plan.to_dict(), recipe=text))
        assert Audit.load(record.folder / "audit.json").summary["convolutions"]["converted"] == 1
        folders.append(record.folder)
    for name in ("recipe.yaml", "plan.json", "audit.json", "audit.csv"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second
        assert str(tmp_path).encode() not in first


def test_what_did_not_run_has_no_key():
    assert Analyses().figures() == {}


def test_the_times_divide_to_their_ratio():
    found = Analyses(found={"bench": comparison(0.73)}).figures()
    assert found["prepared_seconds"] / found["unprepared_seconds"] == found["time_ratio"]
