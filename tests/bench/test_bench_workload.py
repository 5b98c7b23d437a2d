"""A timing of several sizes: the weighted whole, a row for each size, and where the sign changes."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from made import bench_of, comparison, ran, verification
from prepare import Workload
from prepare.app.job.headline import headline
from prepare.core.document import ReportContext, Table
from prepare.core.forward.call import call_of
from prepare.core.forward.workload import Size
from prepare.errors import BenchError
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare
from prepare.stages.bench.document import bench_document
from prepare.stages.bench.records import Bench, Case, Comparison
from prepare.stages.bench.stage import BenchStage
from prepare.stages.bench.time_prepared import Models, time_models

SMALL, LARGE = Size("batch 1", 10.0, 1), Size("batch 4", 1.0, 4)


def slower(**how):
    return comparison(1.10, verdict="slower", interval=(1.08, 1.12), **how)


def both(first, second=None):
    """The bench of two sizes: a call of the unprepared model takes 40 ms in the first, 4 s in the second."""
    second = second or comparison(0.5, interval=(0.48, 0.53))
    rows = tuple(replace(row, seconds=row.seconds * 100) for row in second.rows)
    return Bench.merged([(SMALL, bench_of(first)), (LARGE, bench_of(replace(second, rows=rows)))])


def test_the_whole_counts_each_call_by_its_time():
    found = both(slower())
    row, whole = found.headline, found.cases[0].comparison
    # 10 calls of 40 ms and one of 4 s: 0.4 of 4.4 s with the ratio 1.1, and 4 of 4.4 s with 0.5.
    assert row.ratio == pytest.approx((0.4 * 1.1 + 4 * 0.5) / 4.4)
    assert row.ratio_interval == pytest.approx(
        ((0.4 * 1.08 + 4 * 0.48) / 4.4, (0.4 * 1.12 + 4 * 0.53) / 4.4)
    )
    assert whole.row("unprepared").seconds == pytest.approx(4.4 / 11)
    assert found.cases[0].seconds == pytest.approx((0.4 * 1.1 + 4 * 0.5) / 11)
    assert (row.verdict, row.peak_bytes, row.samples) == ("faster", 1 << 25, ())
    assert whole.aa.noise == pytest.approx(1 / 0.99)
    assert whole.notes == ("at batch 1: a note", "at batch 4: a note")
    assert [each.what for each in found.cases[0].sizes.values()] == [
        "inference, batch 1",
        "inference, batch 4",
    ]


def test_a_size_without_weight_is_shown_and_does_not_count():
    found = Bench.merged([(replace(SMALL, weight=0.0), bench_of(slower())), (LARGE, bench_of())])
    assert found.headline.ratio == pytest.approx(0.73)
    assert len(found.cases[0].sizes) == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_a_size_that_is_not_compared_leaves_the_whole_without_a_ratio(lost):
    missing = replace(bench_of(), cases=(Case(what="inference", reason="too long"),))
    pairs = [(SMALL, bench_of()), (LARGE, bench_of())]
    pairs[lost] = (pairs[lost][0], missing)
    found = Bench.merged(pairs)
    name = pairs[lost][0].name
    assert (found.headline.verdict, found.headline.reason) == (
        "not compared",
        f"at {name}: too long",
    )
    assert found.cases[0].sizes[pairs[1 - lost][0]].row.verdict == "faster"
    nothing = Bench.merged([(SMALL, missing), (LARGE, missing)])
    assert nothing.cases[0].reason == "at batch 1: too long"


def test_the_first_screen_says_where_the_sign_changes():
    document = bench_document(ReportContext(found={"bench": both(slower())}))
    (answer,) = document.answers
    assert (answer.kind, answer.answer) == (
        "warn",
        "2.0x faster at batch 4; 1.1x slower at batch 1",
    )
    assert answer.remark.startswith("1.8x faster (95 % interval: ")
    texts = [text for _, text in document.rows]
    assert texts[0].startswith(
        "inference 2.0x faster at batch 4; 1.1x slower at batch 1; all sizes 1.8x faster"
    )
    assert texts[1].startswith("inference, batch 1 1.1x slower")
    assert texts[2].startswith("inference, batch 4 2.0x faster")
    (table,) = [p for p in document.shown("page") if isinstance(p, Table) and "by size" in p.label]
    assert [row[:4] for row in table.rows[1::2]] == [
        ("batch 1", "10", "prepared", "44.0 ms"),
        ("batch 4", "1", "prepared", "2.00 s"),
    ]
    wrong = bench_document(
        ReportContext(found={"bench": both(slower()), "verify": verification(status="fail")})
    )
    assert wrong.answers[0].kind == "plain"


def test_sizes_of_one_sign_have_the_answer_of_the_whole():
    document = bench_document(ReportContext(found={"bench": both(comparison())}))
    assert document.answers[0].answer == "1.9x faster, 208 instead of 400 ms"
    assert document.rows[0][1].startswith("inference, all sizes 1.9x faster")


def test_figures_have_each_size_under_its_name():
    figures = BenchStage.figures({"bench": both(slower())})
    assert (figures["verdict"], figures["at_batch_1_verdict"], figures["at_batch_4_verdict"]) == (
        "faster", "slower", "faster",
    )  # fmt: skip
    assert figures["at_batch_1_time_ratio"] == 1.1
    names = ["inference", "inference at batch 1", "inference at batch 4"]
    assert [each.what for each in headline(figures).timed] == names


def test_a_record_is_read_back_and_of_one_size_has_no_new_key(tmp_path):
    found = both(slower())
    found.save(tmp_path / "bench.json")
    assert Bench.load(tmp_path / "bench.json") == found
    bench_of().save(tmp_path / "one.json")
    assert '"size' not in (tmp_path / "one.json").read_text()


def test_an_unknown_verdict_at_a_size_is_refused_on_reading(tmp_path):
    found, path = both(slower()), tmp_path / "bench.json"
    found.save(path)
    whole, _, sizes = path.read_text().rpartition('"sizes": ')
    for verdict in ("quick", "no significant difference"):
        path.write_text(f'{whole}"sizes": {sizes.replace("slower", verdict)}')
        with pytest.raises(BenchError, match=f"'{verdict}' is not a verdict"):
            Bench.load(path)


def test_sizes_of_the_unprepared_model_alone_are_shown():
    rows = comparison().rows[:1]
    found = both(replace(comparison(), rows=rows), comparison())
    shown = bench_document(ReportContext(found={"bench": found}))
    assert "baseline at batch 1" in shown.answers[0].answer


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()


def test_variants_are_timed_at_each_size(quick, tmp_path):
    workload = Workload([torch.zeros(1, 3, 8, 8), torch.zeros(2, 3, 8, 8)], weights=[3, 1])
    found = compare({"a": net(), "b": net()}, workload, budget=0.2)
    assert [each.size.name for each in found.sizes] == ["batch 1", "batch 2"]
    ratios = [each.row("b").ratio for each in found.sizes]
    assert min(ratios) <= found.row("b").ratio <= max(ratios)
    assert [each.settings["batch_size"] for each in found.sizes] == [1, 2]
    found.save(tmp_path / "bench.json")
    assert Comparison.load(tmp_path / "bench.json") == found


def test_each_size_has_the_estimate_of_its_own_calls(quick):
    calls = Workload([torch.zeros(1, 3, 8, 8), torch.zeros(2, 3, 8, 8)]).each(call_of)
    models = Models(unprepared=net(), prepared=net(), pipeline=Pipeline([]))
    found = time_models(models, calls, level="short", mode="eval", took=(0.0, 100.0))
    first, second = found.cases[0].sizes.values()
    assert first.row.ratio is not None
    assert "too long for a comparison" in second.row.reason


def test_a_run_has_a_row_for_each_size(tmp_path, monkeypatch, capsys, quick):
    words = "input.workload=[{shape: [1,3,8,8], weight: 10}, {shape: [2,3,8,8]}]"
    code, _, folder = ran(tmp_path, monkeypatch, capsys, words, "bench.seconds=0.3")
    assert code == 0
    figures = json.loads((folder / "result.json").read_text())["figures"]
    assert {"verdict", "at_batch_1_verdict", "at_batch_2_verdict"} <= figures.keys()
    assert "by size" in (folder / "report.html").read_text()
