"""The rounds of a bench, on a simulated clock: order, verdicts, budget and precision."""

import pytest
import torch

from clocks import Clock, noisy
from prepare.stages.bench import Control, compare
from prepare.stages.bench.rounds import Rounds

BATCH = torch.ones(4, 3)


def test_a_clock_that_stands_still_shows_no_difference():
    found = compare({"a": lambda x: x, "b": lambda x: x}, BATCH, _clock=lambda: 0.0)
    assert found.row("b").verdict == "no difference"
    assert found.row("a").throughput is None


def test_faster_slower_and_equal_variants_get_their_verdicts():
    clock = Clock()
    found = compare(
        {
            name: clock.takes(noisy(mean, 0.02, seed))
            for seed, (name, mean) in enumerate(
                {"plain": 0.1, "equal": 0.1, "quick": 0.08, "slow": 0.13}.items()
            )
        },
        BATCH,
        budget=200,
        _clock=clock,
    )
    words = {row.name: row.verdict for row in found.rows}
    assert words == {
        "plain": "baseline",
        "equal": "no difference",
        "quick": "faster",
        "slow": "slower",
    }
    quick = found.row("quick")
    assert quick.ratio == pytest.approx(0.8, rel=0.03)
    assert quick.ratio_interval[0] < 0.8 < quick.ratio_interval[1]
    assert quick.seconds_interval[0] <= quick.seconds <= quick.seconds_interval[1]
    assert quick.throughput == pytest.approx(4 / quick.seconds)
    assert len(quick.samples) == found.repeats
    assert found.aa.interval[0] <= 1 <= found.aa.interval[1]
    assert found.settings["confidence_of_each"] == pytest.approx(1 - 0.05 / 3)


def test_a_round_runs_all_variants_and_the_baseline_twice_shuffled():
    clock, log = Clock(), []
    names = ("plain", "other")
    found = compare(
        {name: clock.takes(0.1, log=log, name=name) for name in names},
        BATCH,
        budget=5.0,
        precision=1e-9,
        baseline="other",
        _clock=clock,
    )
    turns = log[len(names) * 3 :]
    rounds = [tuple(turns[start : start + 3]) for start in range(0, len(turns), 3)]
    assert all(sorted(each) == ["other", "other", "plain"] for each in rounds)
    assert len({*rounds}) > 1
    assert len(rounds) == found.repeats
    assert (found.baseline, found.row("other").ratio, found.row("plain").ratio) == ("other", 1, 1)


def test_the_same_seed_gives_the_same_order():
    def order(seed):
        clock, log = Clock(), []
        variants = {name: clock.takes(0.1, log=log, name=name) for name in "abc"}
        compare(variants, BATCH, budget=9, seed=seed, _clock=clock)
        return log

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("budget", [3.0, 10.0])
def test_the_budget_is_kept(budget):
    clock = Clock()
    variants = {name: clock.takes(noisy(0.1, 0.5, name)) for name in "ab"}
    found = compare(variants, BATCH, budget=budget, precision=1e-6, _clock=clock)
    assert found.seconds == clock.now
    # A round is begun if one as long as the last would still end in time.
    assert budget - 1.5 < found.seconds < budget + 1.0


def test_a_round_that_would_exceed_the_budget_is_not_started():
    clock = Clock()
    variants = {name: clock.takes(0.125) for name in "ab"}
    # 0.75 s of warming up, and rounds of 0.375 s.
    found = compare(variants, BATCH, budget=2.0, precision=1e-9, _clock=clock)
    assert (found.repeats, found.seconds) == (3, 1.875)


def test_a_tiny_budget_runs_one_round_and_notes_it_is_too_few():
    clock = Clock()
    found = compare({name: clock.takes(10.0) for name in "ab"}, BATCH, budget=0.1, _clock=clock)
    assert found.repeats == 1
    row = found.row("b")
    assert (row.seconds, row.ratio, row.ratio_interval) == (10.0, 1.0, None)
    assert (row.verdict, found.aa) == (
        "unclear",
        Control(ratio=1.0, interval=None, noise=None),
    )
    assert row.reason.startswith("too few rounds, 1 of at least 6")
    assert found.notes[0] == (
        "too few rounds to conclude anything: 1 round, and an interval needs 6; give it more time"
    )


def test_the_bench_stops_when_the_ratios_are_precise():
    def rounds(precision):
        clock = Clock()
        variants = {name: clock.takes(noisy(0.1, 0.05, name)) for name in "ab"}
        return compare(variants, BATCH, budget=100, precision=precision, _clock=clock)

    wide, narrow, never = rounds(0.5), rounds(0.02), rounds(0.0001)
    assert wide.repeats == 20
    assert wide.repeats < narrow.repeats < never.repeats
    low, high = narrow.row("b").ratio_interval
    assert (high - low) / 2 / narrow.row("b").ratio <= 0.02
    assert any("are known to" in note for note in never.notes)
    assert not any("are known to" in note for note in narrow.notes)


def test_short_calls_are_timed_in_a_row_after_an_untimed_one():
    clock, log = Clock(), []
    variants = {
        "short": clock.takes(0.001, log=log, name="short"),
        "long": clock.takes(0.02, log=log, name="long"),
    }
    found = compare(variants, BATCH, budget=60, _clock=clock)
    assert (found.row("short").calls, found.row("long").calls) == (5, 5)
    assert found.row("short").seconds == pytest.approx(0.001)
    assert found.settings["untimed_call_first"] is True
    assert log.count("long") == 3 + found.repeats * (1 + 5)
    assert log.count("short") == 3 + 2 * found.repeats * (1 + 5)


def test_the_untimed_call_is_left_out_when_time_is_short():
    clock, log = Clock(), []
    variants = {name: clock.takes(1.0, log=log, name=name) for name in "ab"}
    found = compare(variants, BATCH, budget=50, _clock=clock)
    assert found.settings["untimed_call_first"] is False
    assert log.count("b") == 3 + found.repeats
    assert any("no untimed call" in note for note in found.notes)


def test_progress_is_reported():
    clock, told = Clock(), []
    variants = {name: clock.takes(0.1) for name in "ab"}
    found = compare(variants, BATCH, budget=30, progress=told.append, _clock=clock)
    assert [each.doing for each in told[:3]] == ["warming up a", "warming up b", "timing"]
    assert (told[0].precision, told[-1].precision) == (None, 0.0)
    assert (told[-1].rounds, told[-1].budget) == (found.repeats, 30)


def test_a_round_counts_with_its_last_turn_and_bounds_the_next():
    clock = Clock()
    clock.now = 5.0
    rounds, others = Rounds(clock, seed=3), Rounds(clock, seed=3)
    assert rounds.fits(0.0)  # the first round runs whatever it takes
    turns = rounds.turns("abc")
    some = [next(turns), next(turns)]
    turns.close()  # by an error in a turn
    assert (rounds.count, len({*some})) == (0, 2)
    again = []
    for each in others.turns("abc"):
        again.append(each)
        clock.now += 1.0
    assert (again[:2], sorted(again)) == (some, [*"abc"])
    assert (others.count, others.seconds(), others.fits(6.0), others.fits(5.9)) == (
        1,
        3.0,
        True,
        False,
    )
