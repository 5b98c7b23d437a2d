"""A run's folder: what is written is read again, and any other file is refused in one line."""

import json

import pytest

from prepare.app.job.record import STATUSES, Job, Record, Result, files_in
from prepare.audit import Audit
from prepare.errors import FileError
from prepare.stages.bench import Comparison
from prepare.stages.flow import Flow
from prepare.stages.tune import Tuning
from prepare.stages.verify import Verification

ALL_OF_IT = Result("failed", "model", "a line\nand another", "Traceback ...", 1.25)


@pytest.fixture
def record(tmp_path):
    record = Record(tmp_path / "run")
    record.begin(Job(None, None, [], {}))
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


@pytest.mark.parametrize("cls", [Audit, Flow, Comparison, Tuning, Verification, Result])
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"format": "prepare.plan", "version": 1}', "[" * 100_000,
     '{"format": "prepare.KIND", "version": 9, "rows": []}',
     '{"format": "prepare.KIND", "version": 1, "summary": {}, "rows": [{}], "other": 1}'],
)  # fmt: skip
def test_a_file_that_is_no_record_is_an_error_naming_it(record, cls, text):
    kinds = {Comparison: "bench", Tuning: "tune", Verification: "verify"}
    kind = kinds.get(cls, cls.__name__.lower())
    path = record.folder / "result.json"
    path.write_text(text.replace("KIND", kind))
    with pytest.raises(FileError, match=r"result\.json: (this is |version 9)"):
        record.result() if cls is Result else cls.load(path)


def test_beginning_again_removes_only_files_of_earlier_runs(record):
    for name in (*files_in(), "mine.txt"):
        (record.folder / name).write_text("x")
    record.begin(Job(None, None, [], {}))
    assert [path.name for path in record.folder.iterdir()] == ["mine.txt"]
