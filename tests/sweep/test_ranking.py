"""The order of the rows of a sweep, and the best row."""

from dataclasses import replace

import made
from made import out_of, row
from prepare.app.job.record import Result
from prepare.app.report.sweep_table import conclusions
from prepare.app.sweep.ranking import rank
from prepare.app.sweep.summary import read_summary


def timed(value, ratio, **found):
    return row(f"memfmt={value}", benched=made.bench(ratio, **found), verified=made.verification())


def numbers(rows):
    return [row.number for row in rows]


def test_rows_are_ordered_by_measured_time_then_by_number(swept):
    ranking = rank(read_summary(swept))
    assert numbers(ranking.rows) == [4, 1, 0, 3, 2, 5]
    assert ranking.best == {4}


def test_the_best_row_is_significantly_faster(sweep):
    summary = sweep(timed("a", 1.0, verdict="no difference"), timed("b", 1.2, verdict="slower"))
    assert rank(summary).best == set()
    (said,) = conclusions(summary, rank(summary))
    assert said == "no row is faster than the unprepared model, so leave it as it is"


def test_fields_without_a_best_row_are_one_line(sweep):
    unclear = timed("a", 1.0, verdict="unclear")
    summary = sweep(*(unclear | {"overrides": [f"model={name}", "memfmt=a"]} for name in "xy"))
    assert "of model=x or model=y" in " ".join(conclusions(summary, rank(summary)))


def test_a_verified_row_is_preferred_to_an_unverified_one(sweep):
    unknown = made.verification(status="cannot tell")
    summary = sweep({**timed("a", 0.4), "verified": unknown}, timed("b", 0.5))
    assert rank(summary).best == {1}
    assert numbers(rank(summary).rows) == [0, 1]


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
    assert "speed unclear, as other runs used the same cores: #0" in out
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
