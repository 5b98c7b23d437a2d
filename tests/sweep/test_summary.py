"""Tests of the summary of a sweep, read from its files alone: order, best row, and notes."""

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import sweep_folders as made
from paths import RUN
from prepare.audit import Audit
from prepare.cli import main as cli
from prepare.flow.records import Flow
from prepare.job.headline import FlowFigures, VerifyFigures, headline
from prepare.job.record import Result
from prepare.report.sentences import memory_text, verified_text
from prepare.report.sweep_table import columns, conclusions
from prepare.report.terminal.sweep import show_summary, write_summary
from prepare.sweep.ranking import command, rank
from prepare.sweep.summary import read_summary

HOSTILE = ["=1+1", "<script>alert(1)</script>", "[red]x[/red]", "a|b\nc", "\udc80", '"quoted", and', "x" * 5000]  # fmt: skip


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    return made.formats_by_precisions(tmp_path_factory.mktemp("made") / "swept")


@pytest.fixture
def swept(made_once, tmp_path):
    return Path(shutil.copytree(made_once, tmp_path / "swept"))


@pytest.fixture
def sweep(tmp_path):
    """Makes a sweep of rows, each a mapping of what `add_row` takes beside its overrides."""

    def make(*rows):
        folder = tmp_path / "swept"
        made.plan(folder, [row.pop("overrides") for row in (dict(row) for row in rows)])
        for number, row in enumerate(rows):
            made.add_row(folder, number, **row)
        return read_summary(folder)

    return make


def row(*overrides, **found):
    return {"overrides": ["model=unet3d", *overrides], **found}


def timed(value, ratio, **found):
    return row(f"memfmt={value}", benched=made.bench(ratio, **found), verified=made.verification())


def numbers(rows):
    return [row.number for row in rows]


def out_of(capsys, summary, width=200):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        show_summary(summary)
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------- the order


def test_rows_are_ordered_by_measured_time_then_by_number(swept):
    ranking = rank(read_summary(swept))
    assert numbers(ranking.rows) == [4, 1, 0, 3, 2, 5]
    assert ranking.best == {4}


def test_the_best_row_is_significantly_faster(sweep):
    summary = sweep(timed("a", 1.0, verdict="no difference"), timed("b", 1.2, verdict="slower"))
    assert rank(summary).best == set()
    (said,) = conclusions(summary, rank(summary))
    assert said == "no row is faster than the unprepared model: leave it as it is"


def test_no_advice_is_drawn_from_an_unclear_row(sweep):
    summary = sweep(timed("a", 0.7, verdict="unclear"), timed("b", 1.2, verdict="slower"))
    (said,) = conclusions(summary, rank(summary))
    assert said.startswith(
        "no row was shown to be faster than the unprepared model: measure longer"
    )
    assert numbers(rank(summary).rows) == [0, 1]


def test_rows_timed_on_a_busy_machine_are_named(sweep):
    summary = sweep(timed("a", 0.5, others=1.6), timed("b", 0.9))
    said = [*conclusions(summary, rank(summary))][-1]
    assert said == (
        "this machine is busy (other programs use 1.6 of 2 cores) at #0: "
        "times mean little; try again later"
    )


def test_a_row_whose_interval_overlaps_the_best_is_named(sweep):
    summary = sweep(timed("a", 0.50), timed("b", 0.51), timed("c", 0.9))
    (said,) = conclusions(summary, rank(summary))
    assert said == (
        "best: #0 memfmt=a: 2.0x faster (50 % less time, 95 % interval: 48 to 52 %); "
        "could not be told apart from #1"
    )


def test_a_verified_row_is_preferred_to_an_unverified_one(sweep):
    unknown = made.verification(status="cannot tell")
    summary = sweep({**timed("a", 0.4), "verified": unknown}, timed("b", 0.5))
    assert rank(summary).best == {1}
    assert numbers(rank(summary).rows) == [0, 1]


def test_a_best_row_without_verification_is_marked(sweep):
    summary = sweep({**timed("a", 0.4), "verified": None}, timed("b", 2.0, verdict="slower"))
    (said,) = conclusions(summary, rank(summary))
    assert said.endswith("; correctness: not verified")


def test_a_row_that_failed_verification_is_never_the_best(sweep):
    wrong = {"verified": made.verification(0.3, status="fail"), "result": Result("verification_failed", "outputs")}  # fmt: skip
    ranking = rank(sweep({**timed("a", 0.1), **wrong}, timed("b", 0.9)))
    assert (ranking.best, numbers(ranking.rows)) == ({1}, [1, 0])


def test_rows_timed_on_shared_cores_are_marked_and_not_ranked(sweep, capsys):
    summary = sweep({**timed("a", 0.1), "shared": True}, timed("b", 0.9), timed("c", 0.8))
    ranking = rank(summary)
    assert (ranking.best, numbers(ranking.rows)) == ({2}, [2, 1, 0])
    out = out_of(capsys, summary)
    assert "on shared cores" in next(line for line in out.splitlines() if line.startswith(" 0"))
    assert "not compared, as other jobs ran on the same cores: #0" in out
    everything_shared = replace(summary, rows=[replace(one, shared=True) for one in summary.rows])
    assert rank(everything_shared).groups == ()


def test_times_of_different_models_and_machines_are_not_compared(sweep):
    rows = [timed("a", 0.5), timed("b", 0.4)]
    rows += [{**timed("a", 0.3), "overrides": ["model=unet2d", "memfmt=a"]}]
    rows += [timed("c", 0.2, cpu="another processor")]
    ranking = rank(sweep(*rows))
    assert [numbers(field.rows) for field in ranking.groups] == [[1, 0], [2], [3]]
    assert ranking.best == {1, 2, 3}
    assert all(field.about for field in ranking.groups)
    assert "model=unet2d" in ranking.groups[1].about
    assert "another processor" in ranking.groups[2].about


def test_seeds_and_formats_are_ranked_in_one_group(sweep):
    rows = [{**timed("a", 0.5), "overrides": ["memfmt=a", "seed=0", "device=cpu", "verify=full"]}]
    rows += [{**timed("a", 0.4), "overrides": ["memfmt=b", "seed=1", "device=auto", "verify=none"]}]
    assert len(rank(sweep(*rows)).groups) == 1


# ------------------------------------------------------------------------------------- the terminal


def test_the_terminal_table_has_every_figure_and_marks_the_best(swept, capsys):
    out = out_of(capsys, read_summary(swept))
    head, first, *_ = out.splitlines()
    assert head.split() == ["#", "memfmt", "precision", "status", "speed", "time", "interval", "verified", "converted", "already", "memory", "breaks", "copied", "seconds"]  # fmt: skip
    assert first.split() == ["4*", "channels_last_3d", "bfloat16", "ok", "2.4x", "faster", "-59", "%", "-60", "to", "-58", "%", "pass", "0.004", "8%", "8", "0", "1.0", "MiB", "->", "512.0", "KiB", "13", "52.0", "KiB", "2.0"]  # fmt: skip
    assert "#2: RuntimeError: \"slow_conv3d\" not implemented for 'Half'" in out
    assert "#5: it never started" in out
    assert "pass 2e-07 <1%, wrong in training" in out


@pytest.mark.parametrize("width", [20, 60, 80, 100, 140])
def test_a_narrow_terminal_omits_columns_and_names_them(swept, capsys, width):
    lines = out_of(capsys, read_summary(swept), width).splitlines()
    left = next(line for line in lines if line.startswith("columns left out"))
    assert "copied" in left
    if width >= 80:
        table = lines[: lines.index(left)]
        assert len(table) == 7
        assert max(map(len, table)) <= width
        assert "2.4x faster" in table[1]
        assert "seconds" in left or width > 100


def test_a_reason_that_many_rows_share_is_printed_once(sweep, capsys):
    failed = Result("failed", "error", "RuntimeError: no\nsecond line")
    out = out_of(capsys, sweep(*[row(f"seed={n}", result=failed) for n in range(12)]))
    assert "#0, #1, #2, #3, #4, #5, #6, #7 and 4 more: RuntimeError: no (and 1 more line)\n" in out
    assert out.count("RuntimeError") == 1


def test_empty_columns_are_left_out(sweep):
    summary = sweep(row("seed=0", result=Result("ok", seconds=1.0)), row("seed=1"))
    titles = [column.title for column in columns(summary, rank(summary))]
    assert titles == ["#", "seed", "status", "seconds"]


def test_texts_of_memory_and_verification():
    found = headline(Path("nowhere"))
    assert memory_text(found) == ""
    assert memory_text(replace(found, bytes_before=1 << 20, bytes_after=1 << 20)) == "1.0 MiB"
    changed = replace(found, bytes_before=6 << 20, bytes_after=3 << 20)
    assert memory_text(changed) == "6.0 -> 3.0 MiB"
    assert verified_text(VerifyFigures(status="cannot tell", error=0.1)) == "cannot tell"
    assert verified_text(VerifyFigures(status="pass", error=1e-7, wrong=3)) == "pass 1e-07, wrong in training"  # fmt: skip
    at_a_sixth = VerifyFigures(status="pass", error=1e-3, allowed=6e-3)
    assert verified_text(at_a_sixth) == "pass 0.001 (17 % of the limit)"
    assert verified_text(at_a_sixth, short=True) == "pass 0.001 17%"


def test_a_gradient_is_not_shown_as_the_error_of_the_outputs(tmp_path):
    outputs, gradients, *_ = (found := made.verification(1e-6)).checks
    gradients = replace(gradients, error=0.04)
    replace(found, checks=(outputs, gradients)).save(tmp_path / "verify.json")
    verified = headline(tmp_path).verified
    assert (verified.what, verified.error) == ("outputs", 1e-6)
    replace(found, checks=(gradients,)).save(tmp_path / "verify.json")
    assert headline(tmp_path).verified.what == "input gradients"


def test_the_command_of_a_row_leaves_out_its_folder(swept):
    summary = read_summary(swept)
    asked = ("hydra.sweep.dir=x", "+steps.half={keep: []}", "~model.depth", "hydra/launcher=basic")
    found = command(replace(summary.rows[4], overrides=(*summary.rows[4].overrides, *asked)))
    assert found == "python run.py model=unet3d memfmt=channels_last_3d precision=bfloat16 '+steps.half={keep: []}' '~model.depth'"  # fmt: skip


# ------------------------------------------------------------------------------------- the files


def test_the_csv_has_a_column_for_each_figure(swept):
    write_summary(read_summary(swept), swept)
    with (swept / "summary.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == list("012345")
    best = rows[4]
    wanted = {"memfmt": "channels_last_3d", "precision": "bfloat16", "status": "ok", "best": "True", "converted": "8",
              "bytes_before": "1048576", "bytes_after": "524288", "verified": "pass", "error": "0.004", "allowed": "0.05", "error_of": "outputs",
              "layout_lost": "13", "copied_bytes": "53248", "inference_ratio": "0.41", "inference_verdict": "faster",
              "shared": "False", "seconds": "2.0", "reason": "", "folder": "4-row"}  # fmt: skip
    assert {key: best[key] for key in wanted} == wanted
    assert (rows[2]["reason"], rows[2]["error"]) == ("RuntimeError: \"slow_conv3d\" not implemented for 'Half'", "")  # fmt: skip


def test_the_json_has_the_results_and_marks_the_best(swept):
    write_summary(read_summary(swept), swept)
    data = json.loads((swept / "summary.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.summary", 1)
    row = data["rows"][4]
    assert (row["best"], row["shared"], row["lost"]["breaks"]) == (True, False, 13)
    assert row["timed"][0]["interval"] == pytest.approx([0.3977, 0.4223])
    assert row["overrides"] == ["model=unet3d", "memfmt=channels_last_3d", "precision=bfloat16"]


def test_the_markdown_is_a_table_in_the_order_of_the_rank(swept):
    write_summary(read_summary(swept), swept)
    lines = (swept / "summary.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:8]] == ["| 4\\*", "| 1", "| 0", "| 3", "| 2", "| 5"]  # fmt: skip
    assert len({line.replace("\\|", "").count("|") for line in lines[:8]}) == 1
    assert lines[-1].startswith("best: #4 ")


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
    text = (folder / "summary.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) == len(HOSTILE) + 2
    assert "<script>" not in text
    out = out_of(capsys, summary)
    assert "[red]x[/red]" in out
    assert "\udc80" not in out
    assert "\\udc80" in out


# ------------------------------------------------------------------------------------- at any time


def test_a_copied_folder_gives_the_same_summary(swept, tmp_path):
    there = tmp_path / "elsewhere" / "copy"
    shutil.copytree(swept, there)
    for folder in (swept, there):
        write_summary(read_summary(folder), folder)
    for name in ("summary.json", "summary.csv", "summary.md"):
        assert (swept / name).read_bytes() == (there / name).read_bytes()


def test_a_row_without_a_result_is_crashed_and_others_are_shown(swept):
    (swept / "4-row" / "result.json").unlink()
    summary = read_summary(swept)
    assert summary.rows[4].status == "crashed"
    assert rank(summary).best == {1}


@pytest.mark.parametrize("name", ["audit.json", "flow.json", "verify.json", "bench.json", "result.json"])  # fmt: skip
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 1}', b"\xff", b"[" * 100_000])
def test_a_row_with_an_invalid_file_is_named_and_others_are_shown(swept, name, content):
    (swept / "4-row" / name).write_bytes(content)
    rows = read_summary(swept).rows
    assert (rows[4].status, rows[1].status) == ("crashed", "ok")
    assert name in rows[4].reason


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("audit.json", "summary", {"convolutions": 3}),
        ("audit.json", "summary", {"convolutions": {"converted": "x"}, "bytes_before": 1, "bytes_after": 1}),
        ("verify.json", "checks", [{"what": 1}]),
        ("bench.json", "cases", []),
        ("flow.json", "summary", 3),
    ],
)  # fmt: skip
def test_invalid_figures_in_a_record_are_named(swept, name, key, value):
    path = swept / "4-row" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}, separators=(",", ":")))
    row = read_summary(swept).rows[4]
    if name == "flow.json":  # written otherwise, so it is read as a whole, which counts anew
        assert row.headline.lost.breaks == 13
    else:
        assert row.status == "crashed"
        assert name in row.reason


def test_nan_in_a_record_becomes_none(swept):
    path = swept / "4-row" / "bench.json"
    path.write_text(path.read_text().replace("0.41,", "NaN,").replace("0.41}", "NaN}"))
    summary = read_summary(swept)
    assert summary.rows[4].headline.timed[0].ratio is None
    write_summary(summary, swept)
    assert rank(summary).best == {1}


def test_a_head_gives_the_same_figures_as_the_whole_file(swept):
    short = headline(swept / "4-row")
    for name in ("audit.json", "flow.json"):
        path = swept / "4-row" / name
        path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    assert headline(swept / "4-row") == short
    assert short.lost == FlowFigures(status="ok", breaks=13, copied_bytes=53248, convolutions=0, in_layout=0)  # fmt: skip


def test_a_bench_without_a_baseline_gives_the_reason(sweep, capsys):
    broken = made.bench(error="the unprepared model raised RuntimeError")
    summary = sweep(row("seed=0", benched=broken), row("seed=1", benched=made.bench(0.5)))
    found = summary.rows[0].headline.timed[0]
    assert (found.ratio, found.verdict) == (None, "not compared")
    assert found.reason == "the unprepared model raised RuntimeError"
    assert rank(summary).best == {1}
    assert "#0: not timed: the unprepared model raised RuntimeError\n" in out_of(capsys, summary)


def test_summary_and_diff_do_not_import_torch(swept):
    script = (
        "import sys\nfrom prepare.cli import main as cli\n"
        f"codes = [cli.run(['summary', {str(swept)!r}])]\n"
        f"folders = [{str(swept / '0-row')!r}, {str(swept / '4-row')!r}]\n"
        "codes.append(cli.run(['diff', *folders, '--page', folders[0] + '/diff.html']))\n"
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
    assert "the table is in" not in said.out
    assert "not written: " in said.out
    assert said.err == ""


def test_a_summary_does_not_read_whole_records(swept, monkeypatch):
    def read_whole(path):
        raise AssertionError(path)

    monkeypatch.setattr(Audit, "load", read_whole)
    monkeypatch.setattr(Flow, "load", read_whole)
    rows = read_summary(swept).rows
    assert [row.status for row in rows] == ["ok", "ok", "failed", "ok", "ok", "interrupted"]
    assert rows[4].headline.convolutions["converted"] == 8


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
