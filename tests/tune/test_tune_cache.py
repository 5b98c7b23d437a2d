"""The cache of tunings: when a winner is taken from it, and when it is measured again."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from prepare.core.utils.folders import cache_folder
from prepare.core.utils.machine import NAMES
from prepare.stages.tune import cache as caching
from prepare.stages.tune import session
from prepare.stages.tune.candidates import candidates
from prepare.stages.tune.compare_candidates import CheckResult
from prepare.stages.tune.records import UNPREPARED
from sample_nets import small
from tune_checks import BATCH, found_with


def test_a_cached_winner_is_verified_again(timed, tmp_path):
    how = {"cache": tmp_path}
    first = found_with(timed, {"channels_last": 0.05}, small().eval(), **how)
    again = found_with(timed, {"channels_last": 0.5}, small().eval(), **how)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert (again.winner, again.made, again.rows[1:]) == (first.winner, first.made, first.rows[1:])
    assert again.notes[0].startswith("from the cache, and verified again: measured ")
    assert " ago, on " in again.notes[0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


OTHERS = {
    "another batch size": {"batch": BATCH[:1]},
    "another dtype": {"batch": BATCH.double()},
    "another layout of the input": {"batch": BATCH.to(memory_format=torch.channels_last)},
    "more time": {"budget": 6.0},
    "more allowed": {"allow": ["bfloat16"]},
    "training": {"mode": "train"},
    "something declared": {"declared": {"half": {"dtype": "bfloat16"}}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_cache_holds_only_for_the_same_conditions(timed, tmp_path, name):
    how = {"cache": tmp_path, "budget": 1.0}
    model = small().double() if "dtype" in name else small()
    found_with(timed, {}, small().eval(), **how)
    assert not found_with(timed, {}, model.eval(), **(how | OTHERS[name])).from_cache


def test_conditions_include_the_machine_and_the_structure(monkeypatch):
    found = candidates(small(), declared={}, allow=(), mode="eval")

    def conditions(model=None):
        return caching.conditions(model or small(), BATCH, found, mode="eval", amp="none")

    before = conditions()
    assert conditions() == before
    wider = nn.Sequential(nn.Conv2d(3, 9, 3))
    padded = small()
    padded[0].padding = (1, 1)
    lies = small().to(memory_format=torch.channels_last)
    assert all(conditions(model) != before for model in (wider, padded, lies))
    with monkeypatch.context() as patched:
        patched.setattr("prepare.core.utils.machine._instructions", lambda described: ["another"])
        assert conditions() != before  # a processor of the same name, with other instructions
    assert conditions() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert conditions() != before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cudnn": "9.10.2"}, "cuDNN was none, now 9.10.2"),
        ({"cuda": "12.8"}, "CUDA was none, now 12.8"),
        ({"driver": "580.1"}, "driver was none, now 580.1"),
        ({"architectures": ["sm_86"]}, "architecture was none, now sm_86"),
        ({"hip": "7.0"}, "HIP was none, now 7.0"),
    ],
)
def test_a_stale_tuning_is_measured_again_and_says_why(timed, tmp_path, monkeypatch, change, says):
    without = {"backend": "cpu", **dict.fromkeys(NAMES)}
    monkeypatch.setattr("prepare.core.utils.machine.accelerator", lambda: without)
    found_with(timed, {}, small().eval(), cache=tmp_path)
    assert found_with(timed, {}, small().eval(), cache=tmp_path).from_cache
    now = without | change
    monkeypatch.setattr("prepare.core.utils.machine.accelerator", lambda: now)
    again = found_with(timed, {}, small().eval(), cache=tmp_path)
    assert not again.from_cache
    (note,) = [note for note in again.notes if "is stale" in note]
    assert note.endswith(says)
    assert found_with(timed, {}, small().eval(), cache=tmp_path).from_cache


def test_a_cached_winner_that_fails_is_measured_again(timed, tmp_path, monkeypatch):
    how = {"cache": tmp_path}
    found_with(timed, {"channels_last": 0.05}, small().eval(), **how)
    monkeypatch.setattr(
        session.PreparedCandidate, "check", lambda *_, **__: CheckResult("fail", "outputs: off")
    )
    again = found_with(timed, {}, small().eval(), **how)
    assert (again.from_cache, again.winner) == (False, UNPREPARED)
    assert "the cached winner channels_last was not used: outputs: off" in again.notes


def test_a_cached_winner_that_is_slower_is_not_used(timed, tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "_MAX_NOISE", 100.0)  # on a busy machine there are few rounds
    how = {"cache": tmp_path}
    found_with(timed, {"channels_last": 0.05}, small().eval(), **how)
    (file,) = tmp_path.iterdir()
    stored = json.loads(file.read_text())
    stored["rows"][0] |= {"ratio": 1.06, "ratio_interval": [1.03, 1.08]}
    file.write_text(json.dumps(stored))
    again = found_with(timed, {}, small().eval(), **how)
    assert not again.from_cache
    said = (
        "the winner was not shown to be faster than the unprepared model, so the cache was not used"
    )
    assert said in again.notes
    other = caching.Cache(str(tmp_path / "other"))
    other.store(replace(again, winner=again.rows[-1].name, noise=1.01))
    assert [note for note in other.notes if "not cached: the winner was not shown" in note]
    assert not (tmp_path / "other").exists()


def test_an_unusable_cache_is_a_note_not_an_error(timed, tmp_path):
    how = {"cache": tmp_path, "budget": 1.0}
    found_with(timed, {}, small().eval(), **how)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    found = found_with(timed, {}, small().eval(), **how)
    assert not found.from_cache
    assert [note for note in found.notes if "the cache was not used" in note]
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = found_with(timed, {}, small().eval(), **(how | {"cache": blocked / "folder"}))
    assert found.notes[-1].startswith("the result was not cached: ")
    assert (
        found_with(timed, {}, small().eval(), **(how | {"cache": False})).notes[-1:]
        != found.notes[-1:]
    )


def test_the_cache_is_in_the_cache_folder_of_the_system(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("tune") == tmp_path / "prepare" / "tune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder("tune") == tmp_path / ".cache" / "prepare" / "tune"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 seconds ago"), (61, "1 minute ago"), (7300, "2 hours ago"), (200000, "2 days ago")],
)
def test_the_age_of_a_tuning_is_shown_in_words(seconds, words):
    from datetime import datetime, timedelta

    assert (
        caching.age((datetime.now().astimezone() - timedelta(seconds=seconds)).isoformat()) == words
    )
