"""The record of a tuning: saved, loaded, refused, shown."""

import re
from dataclasses import replace

import pytest

from made import show, tuning
from prepare.core.document import USE_RECIPE, ReportContext
from prepare.errors import TuneError
from prepare.stages.tune import CandidateResult, Tuning
from prepare.stages.tune.document import tune_document, tune_sentence
from prepare.stages.tune.records import UNPREPARED


def record(**changes):
    steps = {"half": {"dtype": "bfloat16", "keep": []}}
    rows = (
        CandidateResult(name="bfloat16", steps=steps, status="winner", reason="takes 0.50 of the time", cost=4,
            seconds=0.05, ratio=0.5, ratio_interval=(0.48, 0.52), rounds=20, verified="pass", error=1e-3,
            allowed=1e-2),
        CandidateResult(name=UNPREPARED, steps={}, status="slower", reason="takes 2.00 times as long", cost=0,
            seconds=0.1, ratio=1.0, rounds=20, error=0.0),
        CandidateResult(name="[red]compile", steps={}, status="not measured", reason="no time", cost=6),
    )  # fmt: skip
    given = {
        "rows": rows,
        "winner": "bfloat16",
        "from_cache": False,
        "conditions": {},
        "environment": {},
    }
    return replace(tuning(), **given | {"notes": ("mind this",)} | changes)


def test_a_tuning_survives_saving_and_loading(tmp_path):
    record().save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == record()


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ('"winner": "bfloat16"', '"winner": "nobody"', "this is not a tuning: KeyError: 'nobody'"),
        ('"slower"', '"sluggish"', "'sluggish' is not a status"),
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
    for text in ("2.0x faster", "1.92x to 2.08x", "slower than another recipe", "[red]compile: not measured: no time", "note: mind this",
                 "20 rounds in 12.0 s; differences below 2.0 % are noise"):  # fmt: skip
        assert text in out


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
        found = record(environment=busy, noise=noise)
        document = tune_document(ReportContext(found={"tune": found}))
        rows = (*found.rows[1:], replace(found.rows[0], status="not faster"))
        unclear = record(rows=rows, winner=UNPREPARED, environment=busy, noise=noise)
        return document.answers[0].sentence + tune_sentence(unclear)

    assert "busy" not in said(1.02)
    assert said(1.2).count("this machine is busy") + said(1.2).count("This machine is busy") == 2
    assert "busy" in said(None)


@pytest.mark.parametrize(
    ("ratio", "interval", "kind", "holds"),
    [
        (0.5, (0.48, 0.52), "good", True),
        (1.06, (1.03, 1.08), "bad", False),
        (0.97, (0.9, 1.05), "warn", False),
    ],
)
def test_only_a_faster_winner_is_ticked_and_advised(ratio, interval, kind, holds):
    rows = record().rows
    found = record(rows=(replace(rows[0], ratio=ratio, ratio_interval=interval), *rows[1:]))
    document = tune_document(ReportContext(found={"tune": found}))
    assert (found.holds, document.answers[0].kind) == (holds, kind)
    assert any(each.answer == USE_RECIPE.answer for each in document.advice) == holds
    (bar,) = [bar for bar in document.lead[0].charts[0].rows if bar.label == "bfloat16"]
    assert (bar.mark == "better") == holds
    assert record(winner=UNPREPARED).holds


@pytest.mark.parametrize("winner", ["bfloat16", UNPREPARED])
def test_the_first_screen_says_that_an_answer_is_cached(winner):
    said = "from the cache, measured on 2026-01-01 at 00:00"
    for cached in (True, False):
        found = record(from_cache=cached, winner=winner)
        answer = tune_document(ReportContext(found={"tune": found})).answers[0]
        assert (said in answer.line, said in answer.remark) == (cached, cached)
