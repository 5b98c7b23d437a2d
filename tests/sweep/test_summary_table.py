"""The table of a sweep in the terminal, in CSV, JSON and Markdown."""

import csv
import json

import pytest

from made import out_of, row
from prepare.app.job.record import Result
from prepare.app.report.sweep_table import write_summary
from prepare.app.sweep.summary import read_summary

HOSTILE = ["=1+1", "<script>alert(1)</script>", "[red]x[/red]", "a|b\nc", "\udc80", '"quoted", and', "x" * 5000]  # fmt: skip


def test_the_terminal_table_has_every_figure_and_marks_the_best(swept, capsys):
    out = out_of(capsys, read_summary(swept), 240)
    head, first, *_ = out.splitlines()
    assert head.split() == ["#", "memfmt", "precision", "status", "speed", "time", "interval", "right", "converted", "already", "memory", "breaks", "copied", "run", "time"]  # fmt: skip
    assert first.split() == ["4*", "channels_last_3d", "bfloat16", "ok", "2.4x", "faster", "41.0", "ms", "2.37x", "to", "2.51x", "pass", "0.004", "8%", "8", "0", "1.0", "MiB", "->", "512.0", "KiB", "13", "52.0", "KiB", "2.0", "s"]  # fmt: skip
    assert "#2: RuntimeError: \"slow_conv3d\" not implemented for 'Half'" in out
    assert "#5: it never started" in out
    assert "pass 2e-07 <1%, wrong in training" in out


def test_the_csv_has_a_column_for_each_figure(swept):
    write_summary(read_summary(swept), swept)
    with (swept / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == list("012345")
    best = rows[4]
    wanted = {"memfmt": "channels_last_3d", "precision": "bfloat16", "status": "ok", "best": "True", "convolutions_converted": "8",
              "bytes_before": "1048576", "bytes_after": "524288", "verified": "pass", "verified_error": "0.004", "verified_allowed": "0.05",
              "layout_breaks": "13", "copied_bytes": "53248", "time_ratio": "0.41", "verdict": "faster",
              "shared": "False", "seconds": "2.0", "reason": "", "folder": "4-row"}  # fmt: skip
    assert {key: best[key] for key in wanted} == wanted
    assert (rows[2]["reason"], rows[2]["verified_error"]) == ("RuntimeError: \"slow_conv3d\" not implemented for 'Half'", "")  # fmt: skip


def test_the_json_has_the_results_and_marks_the_best(swept):
    write_summary(read_summary(swept), swept)
    data = json.loads((swept / "summary.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.summary", 1)
    row = data["rows"][4]
    assert (row["best"], row["shared"], row["figures"]["layout_breaks"]) == (True, False, 13)
    found = [row["figures"][f"time_ratio_{end}"] for end in ("low", "high")]
    assert found == pytest.approx([0.3977, 0.4223])
    assert row["overrides"] == ["model=unet3d", "memfmt=channels_last_3d", "precision=bfloat16"]


def test_hostile_values_survive_every_format_as_text(sweep, tmp_path, capsys):
    rows = [row(f"a={text}", result=Result("failed", "error", text)) for text in HOSTILE]
    summary = sweep(*rows)
    folder = tmp_path / "swept"
    write_summary(summary, folder)
    with (folder / "summary.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    wanted = [text.encode("utf-8", "backslashreplace").decode() for text in HOSTILE]
    assert [row["a"] for row in found] == wanted
    assert [row["reason"] for row in found] == wanted
    data = json.loads((folder / "summary.json").read_text())
    assert [row["choices"]["a"] for row in data["rows"]] == HOSTILE
    out = out_of(capsys, summary)
    assert "[red]x[/red]" in out
    assert ("\udc80" in out, "\\udc80" in out) == (False, True)
