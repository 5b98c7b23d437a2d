"""The summary of a sweep from its files alone: copied, invalid, read-only and large folders."""

import json
import os

import pytest

from prepare.app.cli import main as cli
from prepare.app.sweep.ranking import rank
from prepare.app.sweep.summary import read_summary


def test_a_row_without_a_result_is_crashed_and_others_are_shown(swept):
    (swept / "4-row" / "result.json").unlink()
    summary = read_summary(swept)
    found = (summary.rows[4].status, summary.rows[4].reason)
    assert found == ("crashed", "it ended without a result: killed")
    assert rank(summary).best == {1}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("result.json", "seconds", "x"), ("result.json", "status", "fine"), ("result.json", "seconds", float("nan")),
     ("job.json", "overrides", 3), ("job.json", "number", "4")],
)  # fmt: skip
def test_a_wrong_type_in_a_record_is_one_row_that_says_so(swept, capsys, name, key, value):
    path = swept / "4-row" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert cli.run(["summary", str(swept)]) == 0
    assert f"4-row/{name}: " in capsys.readouterr().out
    row = read_summary(swept).rows[4]
    assert row.status == "crashed"
    assert name in row.reason
    assert [each.status for each in read_summary(swept).rows if each is not row][:4] == [
        "ok",
        "ok",
        "failed",
        "ok",
    ]
    assert len(json.loads((swept / "summary.json").read_text())["rows"]) == 6


@pytest.mark.skipif(os.name != "posix", reason="asks for links")
def test_a_summary_writes_nothing_outside_of_its_folder(swept, tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    written = ("summary.json", "summary.csv", "report.html")
    for name in written:
        (swept / name).unlink(missing_ok=True)
        (swept / name).symlink_to(outside)
    assert cli.run(["summary", str(swept)]) == 0
    assert "the table" in capsys.readouterr().out
    assert outside.read_text() == "mine"
    assert not any((swept / name).is_symlink() for name in written)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_still_summarised(swept, capsys):
    swept.chmod(0o500)
    assert cli.run(["summary", str(swept)]) == 0
    swept.chmod(0o700)
    said = capsys.readouterr()
    assert "4*  channels_last_3d" in said.out
    assert "not written: " in said.out
    assert said.err == ""
