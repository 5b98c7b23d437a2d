"""Ratios of times in words, and which of them are printed."""

from dataclasses import replace

import pytest

from made import comparison
from prepare.core.document import ReportContext
from prepare.core.utils.machine import busy_sentence
from prepare.core.utils.numbers import interval_text, pace_text, speed_text, verdict_text
from prepare.stages.bench.document import bench_document


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.61, 0.72), "1.39x to 1.64x faster"),
        ((0.9, 1.2), "1.20x slower to 1.11x faster"),
        ((2.8, 3.4), "2.80x to 3.40x slower"),
        ((44, 46), "44x to 46x slower"),
        ((11.01, 35.18), "11x to 35x slower"),
        ((0.0498, 0.24), "4.2x to 20x faster"),
        ((0.002, 0.2), "5.0x to 500x faster"),
        ((0.5, 2.5), "2.5x slower to 2.0x faster"),
        (None, ""),
    ],
)
def test_every_interval_is_printed_a_wide_one_coarsely(interval, said):
    assert interval_text(interval) == said


def test_the_times_and_the_ratio_are_one_number():
    assert speed_text("faster", 0.762, time=0.163) == "1.3x faster, 163 instead of 214 ms"
    assert speed_text("slower", 1.2, time=1.08) == "1.2x slower, 1.08 s instead of 900 ms"
    assert speed_text("no difference", 1.0, time=0.04) == "no difference, 40.0 ms"
    assert speed_text("not compared", None) == "not measured"


def test_a_ratio_is_shown_within_its_interval():
    assert verdict_text("faster", 1 / 1.36, (1 / 1.38, 1 / 1.27)) == "1.36x faster"
    assert verdict_text("faster", 1 / 1.36, (1 / 1.42, 1 / 1.27)) == "1.4x faster"
    assert verdict_text("slower", 1.14, (1.12, 1.2)) == "1.14x slower"
    shown = speed_text("faster", 1 / 1.36, (1 / 1.38, 1 / 1.27), time=0.0207, confidence=None)
    assert shown == "1.36x faster, 20.7 instead of 28.2 ms"


@pytest.mark.parametrize(
    ("ratio", "interval", "said"),
    [
        (17.0, (16, 18), "17x slower"),
        (17.0, (11, 35), "over 10x slower"),
        (17.0, (2, 35), "over 2x slower"),
        (50.0, (39, 500), "over 30x slower"),
        (2.4, (1.29, 6), "over 1.2x slower"),
        (2.4, (1.2, 6), "over 1.2x slower"),
        (2.4, (1.059, 6), "over 1.05x slower"),
        (2.4, (1.001, 6), "slower"),
        (0.02, (0.002, 0.2), "over 5x faster"),
        (0.02, (0.0, 0.2), "over 5x faster"),
        (0.1, (1 / 10.9, 1 / 9.1), "10x faster"),
    ],
)
def test_the_figure_of_a_wide_interval_is_its_nearer_end(ratio, interval, said):
    assert verdict_text("faster" if ratio < 1 else "slower", ratio, interval) == said


def test_a_wide_interval_is_said_without_times_of_one_ratio():
    said = speed_text("faster", 0.19, (0.0498, 0.24), time=0.254)
    assert said == "over 4x faster (95 % interval: 4.2x to 20x)"
    said = speed_text("unclear", 0.9, (0.25, 2.0), time=0.254)
    assert said == "unclear (95 % interval: 2.0x slower to 4.0x faster)"
    assert pace_text(0.19, (0.0498, 0.24)) == "over 4x faster (4.2x to 20x)"
    assert pace_text(1.25, (1.2, 1.3)) == "1.2x slower (1.20x to 1.30x)"


def test_a_machine_is_busy_if_that_widens_an_interval():
    little = {"cores_available": 2, "threads": 2, "others": 0.2}
    assert busy_sentence(little, 1.5) == ""  # a tenth of the machine
    busy = little | {"others": 1.6}
    assert busy_sentence(busy, 1.04) == ""  # hardly differed from itself
    assert busy_sentence(busy, 1.5).startswith("this machine is busy (other programs use 1.6 of 2")


def test_a_wide_interval_on_a_busy_machine_says_so_beside_it():
    settings = {"confidence": 0.95, "threads": 2, "cores_available": 2, "others": 1.6}
    noisy = replace(comparison().aa, noise=1.5)
    found = comparison(0.19, interval=(0.0498, 0.24), settings=settings, aa=noisy)
    shown = bench_document(ReportContext(found={"bench": found}))
    assert shown.line == (
        "inference over 4x faster (95 % interval: 4.2x to 20x), as this machine is busy "
        "(other programs use 1.6 of 2 cores)"
    )
    assert not shown.notes  # said once
