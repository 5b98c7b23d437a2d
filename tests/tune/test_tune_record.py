"""The record of a tuning: saved, loaded, refused, shown."""

import re
from dataclasses import replace

import pytest

from made import comparison, show, tuning
from prepare.core.document import USE_RECIPE, ReportContext
from prepare.errors import TuneError
from prepare.stages.bench.records import PROCESSOR
from prepare.stages.tune import CandidateResult, Tuning
from prepare.stages.tune.document import tune_document, tune_sentence
from prepare.stages.tune.records import UNPREPARED


def record(**changes):
    steps = {"half": {"dtype": "bfloat16", "keep": []}}
    rows = (
        CandidateResult(name="bfloat16", steps=steps, status="winner", reason="2.0x faster", cost=4, verdict="faster",
            seconds=0.05, ratio=0.5, ratio_interval=(0.48, 0.52), rounds=20, verified="pass", error=1e-3,
            allowed=1e-2),
        CandidateResult(name=UNPREPARED, steps={}, status="timed", reason="the model as it is", cost=0, verdict="baseline",
            seconds=0.1, ratio=1.0, rounds=20),
        CandidateResult(name="slow", steps={}, status="dropped", reason="dropped after 3 rounds", cost=1, verdict="unclear",
            seconds=0.04, ratio=0.4, ratio_interval=(0.3, 1.6), rounds=3),
        CandidateResult(name="[red]compile", steps={}, status="not measured", reason="no time", cost=6),
    )  # fmt: skip
    last = comparison(aa=replace(comparison().aa, noise=1.02), notes=("mind this",))
    given = {"rows": rows, "winner": "bfloat16", "last": last}
    return replace(tuning(), **given | changes)


def test_a_tuning_survives_saving_and_loading(tmp_path):
    record().save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == record()


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ('"winner": "bfloat16"', '"winner": "nobody"', "this is not a tuning: KeyError: 'nobody'"),
        ('"dropped"', '"sluggish"', "'sluggish' is not a status"),
    ],
)
def test_a_tuning_that_contradicts_itself_is_refused(tmp_path, before, after, wrong):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(TuneError, match=wrong):
        Tuning.load(path)


def test_the_terminal_shows_every_candidate_and_its_reason(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    show("tune", record(), "runs/1")
    out = capsys.readouterr().out
    assert tune_sentence(record()) in out
    said = (
        *("2.0x faster", "1.92x to 2.08x", "dropped after 3 rounds", "outputs at 10 %"),
        *("not measured: no time", "mind this"),
        "20 rounds at last, 12.0 s in all; differences below 2.0 % are noise",
    )
    for text in said:
        assert text in out
    assert "slower than" not in out  # one word for a speed


@pytest.mark.parametrize("ratio", [0.6451, 0.6449, 0.9049, 0.9051, 0.512, 0.346, 1.2449, 2.4551])
def test_the_speed_and_the_times_are_one_number(ratio):
    rows = record().rows
    row = replace(rows[0], ratio=ratio, ratio_interval=(ratio * 0.99, ratio * 1.01))
    said = tune_sentence(record(rows=(row, *rows[1:])))
    (line,) = re.findall(r"is ([\d.]+)x (\w+), ([\d.]+) instead of ([\d.]+) ms", said)
    times, change = float(line[0]), float(line[2]) / float(line[3])
    shown = change if line[1] == "slower" else 1 / change
    assert abs(times - shown) <= 0.055


def test_a_busy_machine_is_said_only_if_the_noise_is_large():
    busy = {"cores_available": 2, "others": 2.0, "threads": 2}

    def said(noise):
        last = comparison(settings=busy, aa=replace(comparison().aa, noise=noise))
        document = tune_document(ReportContext(found={"tune": record(last=last)}))
        return document.answers[0].sentence + tune_sentence(record(winner=UNPREPARED, last=last))

    assert "busy" not in said(1.02)
    assert said(1.2).count("this machine is busy") + said(1.2).count("This machine is busy") == 2
    assert "busy" in said(None)


def test_the_clock_of_the_verdict_is_said():
    busy = {"cores_available": 2, "others": 2.0, "threads": 2, "timer": PROCESSOR}
    found = record(last=comparison(settings=busy))
    (faster, _) = tune_document(ReportContext(found={"tune": found})).answers
    for text in (tune_sentence(found), faster.line, faster.remark):
        assert "processor time, as this machine is busy" in text


def test_a_winner_is_ticked_and_advised_and_nothing_else_is():
    document = tune_document(ReportContext(found={"tune": record()}))
    assert document.answers[0].kind == "good"
    assert [each.answer for each in document.advice] == [USE_RECIPE.answer]
    lost = tune_document(ReportContext(found={"tune": record(winner=UNPREPARED)}))
    assert [each.kind for each in lost.answers] == ["plain", "plain"]
    assert "shown to be faster" in lost.answers[0].answer
    assert [each.answer for each in lost.advice] == ["Leave the model as it is"]
