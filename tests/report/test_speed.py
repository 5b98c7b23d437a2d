"""Ratios of times in words, and which of them are printed."""

import pytest

from prepare.core.utils.numbers import change_text, interval_text, verdict_text


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.61, 0.72), "-39 to -28 %"),
        ((2.8, 3.4), "2.8x to 3.4x"),
        ((44, 46), "44x to 46x"),
        ((11.01, 35.18), ""),
        ((0.5, 2.5), ""),
        (None, ""),
    ],
)
def test_an_interval_beyond_sense_is_not_printed(interval, said):
    assert interval_text(interval) == said


def test_a_ratio_from_3_on_is_shown_as_a_factor():
    assert (change_text("slower", 1.5), change_text("slower", 17.0)) == ("+50 %", "")
    assert verdict_text("slower", 17.0, (16, 18)) == "17x slower"
    assert verdict_text("slower", 17.0, (11, 35)) == "over 10x slower"
    assert verdict_text("slower", 17.0, (2, 35)) == "slower"
