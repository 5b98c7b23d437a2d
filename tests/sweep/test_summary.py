"""The summary of a sweep from its files alone: copied, invalid, read-only and large folders."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import made
from made import out_of, row
from paths import RUN
from prepare.app.cli import main as cli
from prepare.app.report.sweep_table import write_summary
from prepare.app.sweep.ranking import rank
from prepare.app.sweep.summary import read_summary


def test_a_copied_folder_gives_the_same_summary(swept, tmp_path):
    there = tmp_path / "elsewhere" / "copy"
    shutil.copytree(swept, there)
    for folder in (swept, there):
        write_summary(read_summary(folder), folder)
    for name in ("summary.json", "summary.csv"):
        assert (swept / name).read_bytes() == (there / name).read_bytes()


def test_a_row_without_a_result_is_crashed_and_others_are_shown(swept):
    (swept / "4-row" / "result.json").unlink()
    summary = read_summary(swept)
    found = (summary.rows[4].status, summary.rows[4].reason)
    assert found == ("crashed", "it ended without a result: killed")
    assert rank(summary).best == {1}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 1}', b"\xff", b"[" * 100_000])
def test_a_row_with_an_invalid_file_is_named_and_others_are_shown(swept, content):
    (swept / "4-row" / "result.json").write_bytes(content)
    rows = read_summary(swept).rows
    assert (rows[4].status, rows[1].status) == ("crashed", "ok")
    assert "result.json" in rows[4].reason


@pytest.mark.parametrize(
    "figures",
    [
        3,
        {"convolutions_converted": "x"},
        {"bytes_before": {}},
        {"verified_error": "x"},
        {"time_ratio": [1]},
    ],
)
def test_invalid_figures_in_a_result_are_named(swept, figures):
    path = swept / "4-row" / "result.json"
    data = json.loads(path.read_text())
    given = data["figures"] | figures if isinstance(figures, dict) else figures
    path.write_text(json.dumps(data | {"figures": given}))
    rows = read_summary(swept).rows
    assert (rows[4].status, rows[1].status) == ("crashed", "ok")
    assert "result.json" in rows[4].reason


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
    assert key in row.reason
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


def test_a_row_has_the_figures_of_its_layout_flow(swept):
    found = read_summary(swept).rows[4].figures
    assert (found["flow"], found["layout_breaks"], found["copied_bytes"]) == ("ok", 13, 53248)


def test_a_bench_without_a_baseline_gives_the_reason(sweep, capsys):
    broken = made.bench(error="the unprepared model raised RuntimeError")
    summary = sweep(row("seed=0", benched=broken), row("seed=1", benched=made.bench(0.5)))
    found = summary.rows[0].figures
    assert (found.get("time_ratio"), found["verdict"]) == (None, "not compared")
    assert found["timed_reason"] == "the unprepared model raised RuntimeError"
    assert rank(summary).best == {1}
    assert "#0: speed not" in out_of(capsys, summary)


def test_summary_and_diff_do_not_import_torch(swept):
    script = (
        "import sys\nfrom prepare.app.cli import main as cli\n"
        f"codes = [cli.run(['summary', {str(swept)!r}])]\n"
        f"folders = [{str(swept / '0-row')!r}, {str(swept / '4-row')!r}]\n"
        "codes.append(cli.run(['diff', *folders]))\n"
        "print(codes, 'torch' in sys.modules, 'hydra' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=RUN.parent)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[0, 0] False False"
    assert (swept / "report.html").is_file()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_still_summarised(swept, capsys):
    swept.chmod(0o500)
    assert cli.run(["summary", str(swept)]) == 0
    swept.chmod(0o700)
    said = capsys.readouterr()
    assert "4*  channels_last_3d" in said.out
    assert "not written: " in said.out
    assert said.err == ""


def test_a_summary_that_cannot_be_written_is_still_shown(swept, capsys):
    (swept / "summary.json").mkdir()
    assert cli.run(["summary", str(swept)]) == 0
    said = capsys.readouterr()
    assert "best: #4" in said.out
    assert "the table" not in said.out
    assert "not written: " in said.out
    assert said.err == ""


def test_a_summary_reads_no_other_file_than_results(swept):
    before = read_summary(swept).rows
    for name in ("audit.json", "flow.json", "verify.json", "bench.json", "recipe.yaml"):
        (swept / "4-row" / name).unlink()
    rows = read_summary(swept).rows
    assert rows == before
    assert rows[4].figures["convolutions_converted"] == 8


@pytest.mark.slow
def test_a_sweep_of_a_thousand_rows_is_summarised(tmp_path):
    folder = tmp_path / "swept"
    audited = made.audit(8, names=[f"block.{n}" for n in range(500)])
    made.plan(folder, [[f"seed={n}"] for n in range(1000)])
    for n in range(1000):
        made.add_row(folder, n, [f"seed={n}"], audited=audited, benched=made.bench(0.5 + n / 1000), verified=made.verification())  # fmt: skip
    assert cli.run(["summary", str(folder)]) == 0
    assert len(json.loads((folder / "summary.json").read_text())["rows"]) == 1000
    assert (folder / "report.html").stat().st_size < 3_000_000
