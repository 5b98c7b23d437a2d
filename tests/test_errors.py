"""Errors hold their data, travel between processes, and guess what was meant."""

import pickle

import pytest

from prepare.core.utils.suggest import choose, nearest
from prepare.errors import ConfigError, PartialError, PrepareError, Problem


def tree(cls=PrepareError):
    yield cls
    for sub in cls.__subclasses__():
        yield from tree(sub)


@pytest.mark.parametrize("cls", [c for c in tree() if c is not PartialError])
def test_every_error_travels_between_processes_with_its_data(cls):
    error = cls.of([Problem("steps.half", "is wrong", "mend it"), Problem("", "so is this")])
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert again.problems == error.problems
    assert str(again) == "steps.half: is wrong; mend it\nso is this"


def test_a_partial_failure_keeps_what_changed():
    error = PartialError(RuntimeError("no"), ["a"], ["b", "c"])
    again = pickle.loads(pickle.dumps(error))
    assert (again.changed, again.unchanged) == (["a"], ["b", "c"])
    assert str(again) == (
        "low_memory: RuntimeError after 1 of 3 tensors: no; changed: a; as before: b, c; apply again to finish"
    )


def test_the_nearest_word_comes_first_and_case_does_not_count():
    assert (
        nearest("Chanels_Last", ["contiguous", "channels_last_3d", "channels_last"])[0]
        == "channels_last"
    )
    assert nearest("zzz", ["half", "device"]) == []
    assert choose("haf", ["half", "device"]) == "did you mean 'half'? allowed: half, device"
    assert choose("x", [], noun="steps") == "steps: none"


@pytest.mark.parametrize("mark", ["\x1b[31m", "\x07", "\x9b1m", "\r", "\u202e"])
def test_no_command_for_a_terminal_is_in_an_error(mark):
    error = ConfigError(f"steps.{mark}", f"{mark} is wrong\nin two lines: é", f"drop {mark}")
    several = ConfigError.of([*error.problems, Problem("a", mark)])
    assert mark not in str(error) + str(several)
    assert str(error).count("\\") == 3
    assert "wrong\nin two lines: é" in str(error)
    assert error.problems[0].where == f"steps.{mark}"


@pytest.mark.parametrize("mark", ["\n", "\t", "\u2028", "\ud800", "a" * 9000])
def test_the_place_of_an_error_is_one_short_printable_line(mark):
    text = str(ConfigError(f"steps.{mark}", "is wrong"))
    assert text.isprintable()
    assert text.startswith("steps.")
    assert text.endswith(": is wrong")
    assert len(text) < 3000


def test_what_is_wrong_and_the_number_of_lines_are_bounded():
    error = ConfigError.of([Problem("a", "x" * 90_000)] * 5_000)
    assert len(str(error)) < 400_000
    assert str(error).endswith("\nand 4,900 more problems")
    assert len(error.problems) == 5_000


def test_several_problems_are_one_error_a_line_each():
    error = ConfigError.of([Problem("a", "1"), Problem("b", "2", "3")])
    assert str(error) == "a: 1\nb: 2; 3"
    assert len(error.problems) == 2
