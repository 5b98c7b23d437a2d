"""Ratios of times in words, and which of them are printed."""

import pytest

from prepare.core.utils.numbers import interval_text, speed_text, verdict_text


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.61, 0.72), "1.39x to 1.64x faster"),
        ((0.9, 1.2), "1.20x slower to 1.11x faster"),
        ((2.8, 3.4), "2.80x to 3.40x slower"),
        ((44, 46), "44x to 46x slower"),
        ((11.01, 35.18), ""),
        ((0.5, 2.5), ""),
        (None, ""),
    ],
)
def test_an_interval_beyond_sense_is_not_printed(interval, said):
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


def test_a_large_ratio_with_a_wide_interval_is_no_figure():
    assert verdict_text("slower", 17.0, (16, 18)) == "17x slower"
    assert verdict_text("slower", 17.0, (11, 35)) == "over 10x slower"
    assert verdict_text("slower", 17.0, (2, 35)) == "slower"
