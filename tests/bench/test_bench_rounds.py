"""The rounds of a bench, on a simulated clock: order, verdicts, budget and precision."""

import pytest
import torch

from clocks import Clock, noisy
from prepare.stages.bench import Control, compare, compare_variants
from prepare.stages.bench.records import PROCESSOR

BATCH = torch.ones(4, 3)


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
    assert len(quick.samples) == found.repeats
    assert found.aa.interval[0] <= 1 <= found.aa.interval[1]
    assert found.settings["confidence_of_each"] > 1 - 0.05 / 3  # the looks share the error


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


@pytest.mark.parametrize("budget", [3.0, 10.0])
def test_the_budget_is_kept(budget):
    clock = Clock()
    variants = {name: clock.takes(noisy(0.1, 0.5, name)) for name in "ab"}
    found = compare(variants, BATCH, budget=budget, precision=1e-6, _clock=clock)
    assert found.seconds == clock.now
    # A round is begun if one as long as the last would still end in time.
    assert budget - 1.5 < found.seconds < budget + 1.0


def test_a_tiny_budget_runs_one_round_and_notes_it_is_too_few():
    clock = Clock()
    found = compare({name: clock.takes(10.0) for name in "ab"}, BATCH, budget=0.1, _clock=clock)
    assert found.repeats == 1
    row = found.row("b")
    assert (row.seconds, row.ratio, row.ratio_interval) == (10.0, 1.0, None)
    assert (row.verdict, found.aa) == ("unclear", Control(ratio=1.0, interval=None, noise=None))
    assert row.reason.startswith("too few rounds, 1 of at least 6")


PAIR = {"a": 0.1, "b": 0.08}


def test_the_bench_stops_when_the_ratios_are_precise():
    def rounds(precision):
        clock = Clock()
        variants = {name: clock.takes(noisy(mean, 0.05, name)) for name, mean in PAIR.items()}
        return compare(variants, BATCH, budget=100, precision=precision, _clock=clock)

    wide, narrow, never = rounds(0.5), rounds(0.03), rounds(0.0001)
    assert wide.repeats < narrow.repeats < never.repeats
    # What the looks have not spent of the error is left for the end.
    spent = sum(part for count, part in compare_variants.LOOKS.items() if count < never.repeats)
    left = pytest.approx(1 - 0.05 * (1 - spent))
    assert never.settings["confidence_of_each"] == left
    low, high = narrow.row("b").ratio_interval
    assert (high - low) / 2 / narrow.row("b").ratio <= 0.03


def two_clocks(wall, processor, times):
    """Variants by name: the seconds of a call on the wall, and those of this process."""

    def variant(on_wall, of_process):
        def call(x):
            wall.now += on_wall()
            processor.now += of_process

        return call

    return {name: variant(*each) for name, each in times.items()}


def test_on_a_busy_machine_the_verdict_follows_processor_time(monkeypatch):
    busy = {"cores_available": 2, "others": 1.9, "threads": 2}
    monkeypatch.setattr(compare_variants.MachineWatch, "conditions", lambda _: busy)
    wall, processor = Clock(), Clock()
    times = {"plain": (noisy(0.3, 1.0, 1), 0.1), "quick": (noisy(0.2, 1.0, 2), 0.08)}
    variants = two_clocks(wall, processor, times)
    found = compare(variants, BATCH, precision=None, _clock=wall, _processor=processor)
    quick = found.row("quick")
    assert (quick.verdict, found.settings["timer"]) == ("faster", PROCESSOR)
    assert quick.ratio == pytest.approx(0.8)
    assert (quick.seconds, quick.processor_seconds) == (pytest.approx(0.08), pytest.approx(0.08))
    assert quick.wall_seconds > 0.1
    assert found.aa.ratio == pytest.approx(1.0)
    assert found.clock_remark == (
        "processor time, as this machine is busy (other programs use 1.9 of 2 cores)"
    )


@pytest.mark.parametrize("many", [False, True])
def test_quiet_or_in_several_processes_it_follows_the_wall(monkeypatch, many):
    others = 1.9 if many else 0.0
    quiet = {"cores_available": 2, "others": others, "threads": 2}
    monkeypatch.setattr(compare_variants.MachineWatch, "conditions", lambda _: quiet)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: many)
    wall, processor = Clock(), Clock()
    times = {"plain": (noisy(0.1, 0.01, 1), 0.1), "other": (noisy(0.2, 0.01, 2), 0.01)}
    variants = two_clocks(wall, processor, times)
    found = compare(variants, BATCH, precision=None, _clock=wall, _processor=processor)
    assert (found.row("other").verdict, found.settings["timer"]) == ("slower", "wall clock")
    assert found.clock_remark == ""
