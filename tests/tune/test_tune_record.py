"""The record of a tuning: saved, loaded, refused, shown."""

import json

import pytest

from prepare.errors import TuneError
from prepare.tune import CandidateResult, Tuning
from prepare.tune.document import tune_sentence
from prepare.tune.records import UNPREPARED
from shown_records import show


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
    whole = {
        "rows": rows, "winner": "bfloat16", "mode": "eval", "allow": ("bfloat16",), "budget": 60.0,
        "seconds": 12.0, "rounds": 20, "noise": 1.02, "made": "2026-01-01T00:00:00+00:00",
        "from_cache": False, "conditions": {}, "environment": {}, "notes": ("mind this",),
    }  # fmt: skip
    return Tuning(**(whole | changes))


def test_a_tuning_survives_saving_and_loading(tmp_path):
    record().save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == record()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"format": "prepare.bench"}, "this is a prepare.bench, not a prepare.tune"),
        ({"version": 2}, "version 2 is not known here"),
        ({"winner": "nobody"}, "this is not a tuning: KeyError: 'nobody'"),
        ({"rows": [{}]}, "this is not a tuning: ValueError: the keys are"),
        ({"more": 1}, "this is not a tuning: ValueError: the keys are"),
        ({"rows": 3}, "this is not a tuning: TypeError"),
    ],
)
def test_a_file_that_is_not_a_tuning_is_refused_with_the_reason(tmp_path, change, wrong):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TuneError) as error:
        Tuning.load(path)
    assert wrong in str(error.value)


def test_an_unknown_status_is_refused(tmp_path):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(path.read_text().replace('"slower"', '"sluggish"'))
    with pytest.raises(TuneError, match="'sluggish' is not a status"):
        Tuning.load(path)


def test_the_terminal_shows_every_candidate_and_its_reason(capsys):
    show("tune", record(), "runs/1")
    out = capsys.readouterr().out
    assert tune_sentence(record()) in out
    for text in ("2.0x faster", "-52 to -48 %", "slower than another recipe", "[red]compile: not measured: no time", "note: mind this",
                 "20 rounds in 12.0 s; differences below 2.0 % are noise", "runs/1/tune.json"):  # fmt: skip
        assert text in out
