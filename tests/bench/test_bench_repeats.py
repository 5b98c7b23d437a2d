"""Outputs of the calls of a bench: the same input gives the same values, or the result says how often not."""

import pytest
import torch
from torch import nn

from clocks import Clock
from prepare.core.document import ReportContext
from prepare.stages.bench import compare
from prepare.stages.bench.document import bench_document
from prepare.stages.bench.repeats import Repeats

X = torch.randn(2, 3)


class Flaky(nn.Module):
    """Wrong in one call of `every`; never, if that is 0. A call takes 0.1 s."""

    def __init__(self, every=0, wrong=lambda y: y + 1):
        super().__init__()
        self.linear, self.calls, self.every, self.wrong = nn.Linear(3, 3), 0, every, wrong

    def forward(self, x):
        self.calls += 1
        self.clock.now += 0.1
        y = self.linear(x)
        return self.wrong(y) if self.every and self.calls % self.every == 0 else y


def timed(unprepared, prepared, **options):
    variants = {"unprepared": unprepared, "prepared": prepared}
    Flaky.clock = Clock()
    return compare(variants, X, budget=1e3, precision=0.5, _clock=Flaky.clock, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda y: y + 1,
        lambda y: y * float("nan"),
        lambda y: y.half(),
        lambda y: y[:1],
        lambda y: {"y": y, "more": y},
        lambda y: y > 0,
    ],
)
def test_a_model_that_is_wrong_now_and_then_fails(wrong):
    found = timed(Flaky(), Flaky(3, wrong))
    row = found.row("prepared")
    assert (row.verdict, row.ratio) == ("failed", None)
    assert "calls with the same input returned other values" in row.reason
    assert row.reason.endswith("; 0 of 75 calls of the baseline")
    assert not found.row("unprepared").repeats


def test_a_model_that_is_so_unprepared_gets_a_remark():
    found = timed(Flaky(3), Flaky(3))
    assert found.row("prepared").verdict == "no difference"
    assert all(f"{row.name}: {row.repeats}" in found.notes for row in found.rows)
    notes = bench_document(ReportContext(found={"bench": found.as_bench()})).notes
    assert [f"the {row.name} model: {row.repeats}" for row in found.rows] == list(notes)


def test_a_rare_difference_is_a_remark_and_no_failure():
    row = timed(Flaky(), Flaky(40)).row("prepared")
    assert row.verdict == "no difference"
    assert row.repeats.startswith("1 of ")


def test_rounding_and_random_numbers_of_training_are_no_difference():
    found = timed(Flaky(), Flaky(3, lambda y: y * (1 + 1e-6)))
    assert not any(row.repeats for row in found.rows)
    found = timed(*(nn.Sequential(Flaky(), nn.Dropout()) for _ in range(2)), train=True)
    assert not any(row.repeats for row in found.rows)


def test_outputs_that_are_too_large_to_keep_are_not_compared():
    repeats, batch = Repeats(), object()
    for value in range(3):
        repeats.compare(batch, torch.full((), value).expand(2**25))
    assert (repeats.compared, repeats.differing) == (0, 0)
