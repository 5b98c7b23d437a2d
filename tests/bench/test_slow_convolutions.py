"""A run whose format does not pay names the convolutions that are slower in it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.core.forward.example_input import Example
from prepare.pipeline import Pipeline
from prepare.stages.bench import slow_convolutions, stage
from prepare.stages.bench.slow_convolutions import slower_note

EXAMPLE = Example((torch.randn(1, 3, 6, 6),))
BEFORE = {"0": 1.0, "1": 1.0, "2": 1.0}
STEPS = {"conv2d_memory_format": {}}


def network():
    return nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in BEFORE), nn.ReLU())


def note(seconds=1e9):
    examples = (EXAMPLE, EXAMPLE)
    return slower_note(network(), network(), examples, amp="none", seconds=seconds)


@pytest.fixture
def rounds(monkeypatch):
    """Let each round give these seconds to the prepared convolutions."""
    after = []
    answers = (each for seconds in after for each in (BEFORE, seconds))
    monkeypatch.setattr(slow_convolutions, "_seconds", lambda *_: next(answers))
    return after


def test_what_is_slower_in_every_round_is_named(rounds):
    rounds += [{"0": 2.0, "1": 1.5, "2": 0.5}, {"0": 2.0, "1": 1.05, "2": 3.0}]
    rounds += [{"0": 1.2, "1": 2.0, "2": 0.9}]
    assert note() == "1 convolution is slower in this format here: 0"


def test_several_are_counted_and_none_is_silent(rounds):
    rounds += 3 * [{"0": 2.0, "1": 1.5, "2": 1.0}] + 3 * [BEFORE]
    assert note() == "2 convolutions are slower in this format here: 0, 1"
    assert note() == ""


def test_it_ends_when_its_part_of_the_run_is_over(rounds):
    rounds += [{"0": 2.0}]
    assert note(seconds=0.0) == ""


def test_each_convolution_is_timed_and_no_hook_stays():
    model = network()
    spent = slow_convolutions._seconds(model, EXAMPLE, "none")
    assert spent.keys() == BEFORE.keys()
    assert all(seconds > 0 for seconds in spent.values())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model)


@pytest.mark.parametrize(
    ("verdict", "steps", "asked"),
    [
        ("slower", STEPS, True),
        ("no difference", STEPS, True),
        ("faster", STEPS, False),
        ("unclear", STEPS, False),
        ("slower", {}, False),
    ],
)
def test_only_a_format_that_does_not_pay_is_asked(verdict, steps, asked, monkeypatch):
    monkeypatch.setattr(slow_convolutions, "slower_note", lambda *_, seconds, **__: f"{seconds} s")
    pipeline = Pipeline.from_config(steps)
    work = SimpleNamespace(
        reference=network(), model=network(), example=EXAMPLE, formatted=EXAMPLE, amp="none", pipeline=pipeline
    )  # fmt: skip
    found = SimpleNamespace(headline=SimpleNamespace(verdict=verdict), seconds=20.0)
    assert stage._slower_note(work, found) == ("2.0 s" if asked else "")
