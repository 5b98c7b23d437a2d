"""The record of a tuning: saved, loaded, refused, shown."""

from dataclasses import replace

import pytest

from made import comparison, tuning
from prepare.errors import FileError
from prepare.stages.tune import CandidateResult, Tuning
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
        ('"winner": "bfloat16"', '"winner": "nobody"', "this is not a tuning: KeyError: nobody"),
        ('"dropped"', '"sluggish"', "'sluggish' is not a status"),
    ],
)
def test_a_tuning_that_contradicts_itself_is_refused(tmp_path, before, after, wrong):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(FileError, match=wrong):
        Tuning.load(path)
