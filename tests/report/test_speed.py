"""Ratios of times in words, and which of them are printed."""

from prepare.core.utils.machine import busy_sentence
from prepare.core.utils.text import speed_text, verdict_text


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


def test_a_machine_is_busy_if_that_widens_an_interval():
    little = {"cores_available": 2, "threads": 2, "others": 0.2}
    assert busy_sentence(little, 1.5) == ""  # a tenth of the machine
    busy = little | {"others": 1.6}
    assert busy_sentence(busy, 1.04) == ""  # hardly differed from itself
    assert busy_sentence(busy, 1.5).startswith("this machine is busy (other programs use 1.6 of 2")
