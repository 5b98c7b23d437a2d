"""Test the estimates of time and memory, and runs that do not fit."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.core.forward.call import call_of
from prepare.stages.verify import check_model, verify
from prepare.stages.verify.document import verify_document, verify_sentence
from prepare.stages.verify.execution.budget import Budget, Cost, estimate
from prepare.stages.verify.execution.determinism import training_flags
from prepare.stages.verify.execution.runner import CannotTellError, Runner
from verify_checks import FLAT, Draws, check, flat_norm, prepared
from verify_faults import FAULTS, Net


def estimated(model, batch):
    return estimate(model, call_of(batch), training_flags(model, "eval"))


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"memory": 1000}, "the limit is 1000 bytes"), ({"seconds": 1e-9}, "s are left")],
)
def test_a_run_that_does_not_fit_is_cannot_tell_with_the_reason(limit, reason):
    result = check(Net(), FLAT, torch.randn(2, 3, 16, 16), **limit)
    assert result.status == "cannot tell"
    assert reason in result.reason
    (advice,) = verify_document(SimpleNamespace(found={"verify": result})).advice
    assert advice.answer == f"Raise verify.{next(iter(limit))}"


def test_gradients_that_do_not_fit_are_skipped_and_outputs_pass():
    model, batch = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(2, 3, 64, 64)
    memory = estimated(model, batch).bytes(torch.float32, backward=True) - 1
    result = check(model, FLAT, batch, memory=memory)
    notes = {item.what: item.note for item in result.checks if item.status == "skipped"}
    assert result.status == "pass"
    assert {"input gradients", "parameter gradients"} <= set(notes)
    assert "not compared: a call in float32 needs" in notes["input gradients"]
    assert "raise verify.memory" in notes["input gradients"]
    assert check(model, FLAT, batch, memory=memory, mode="train").status == "cannot tell"


def second_look_fails(monkeypatch):
    def refuse(*_, **__):
        raise CannotTellError("no time is left")

    monkeypatch.setattr(Runner, "run_perturbed", refuse)
    monkeypatch.setattr("prepare.stages.verify.compare_case.compare_modules", refuse)
    reference, batch = flat_norm(nn.SiLU())
    return reference, batch, {"conv2d_memory_format": {}}


@pytest.mark.parametrize(("mode", "status"), [("eval", "pass"), ("train", "cannot tell")])
def test_without_a_second_look_nothing_is_said_to_be_off(monkeypatch, mode, status):
    reference, batch, steps = second_look_fails(monkeypatch)
    result = check(reference, steps, batch, mode=mode)
    notes = [item.note for item in result.checks if "second look" in item.note]
    assert result.status == status
    assert notes
    assert not any(" off" in item.note for item in result.checks)


@pytest.mark.parametrize("fault", [None, "mixed samples", "a doubled gradient"])
def test_a_slow_batch_compares_gradients_of_one_sample(monkeypatch, fault):
    monkeypatch.setattr("prepare.stages.verify.check_model._LONG", 0.0)
    reference = Net().eval()
    pipeline, model = prepared(reference, FLAT)
    if fault:
        FAULTS[fault](model)
    result = verify(reference, model, torch.randn(2, 3, 16, 16), pipeline=pipeline)
    compared = [(item.what, item.batch) for item in result.checks if item.batch]
    assert compared[:2] == [("outputs", 2), ("outputs", 1)]
    wrong = {item.what for item in result.checks if item.status in ("fail", "wrong")}
    expected = {None: set(), "mixed samples": {"outputs"}}
    assert wrong == expected.get(fault, {"input gradients", "parameter gradients"})


@pytest.mark.parametrize(("others", "threads"), [(0, 2), (1, 1), (9, 1)])
def test_busy_cores_leave_one_thread_for_each_free_core(monkeypatch, others, threads):
    monkeypatch.setattr(check_model, "_other_runnable", lambda: others)
    monkeypatch.setattr(check_model, "usable_cores", lambda: {0, 1})
    torch.set_num_threads(2)
    try:
        with check_model._threads_for_free_cores():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_reference_runs_in_float32_if_float64_does_not_fit():
    model, batch = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 32, 32)
    cost = estimated(model, batch)
    memory = cost.bytes(torch.float64, backward=True) - 1
    result = check(model, FLAT, batch, memory=memory)
    assert (result.status, result.reference) == ("pass", "float32")
    assert check(model, FLAT, batch).reference == "float64"


def deep(layers=40):
    """Return a network of so many layers that float64 needs more memory than its modules one by one."""
    parts = [part for _ in range(layers) for part in (nn.Conv2d(2, 2, 1), nn.Tanh())]
    return nn.Sequential(*parts), torch.randn(2, 2, 32, 32)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_modules_are_compared_alone_if_float64_does_not_fit(mode):
    model, batch = deep()
    cost = estimated(model, batch)
    memory = cost.bytes(torch.float64, backward=True) - 1
    # A recorded backward does not fit either, so modules get random gradients.
    assert cost.bytes_by_module(torch.float32, backward=True) > memory
    result = check(model, FLAT, batch, mode=mode, memory=memory)
    found = {item.what: item for item in result.checks}
    assert (result.status, result.reference) == ("pass", "float32")
    assert found["module gradients"].status == found["module outputs"].status == "pass"
    assert found["module gradients"].compared == 81
    assert "81 modules" in verify_sentence(result)


def test_modules_that_do_not_fit_are_skipped_with_a_reason():
    model, batch = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 32, 32)
    memory = estimated(model, batch).bytes(torch.float64, backward=True) - 1
    checks = {item.what: item for item in check(model, FLAT, batch, memory=memory).checks}
    note = checks["module gradients"].note
    assert checks["module gradients"].status == "skipped"
    assert note.startswith("not compared: a comparison of each module alone needs about")
    assert note.endswith("raise verify.memory")


def test_modules_that_are_left_when_the_time_is_over_are_counted(monkeypatch):
    model, batch = deep(2)
    memory = estimated(model, batch).bytes(torch.float64, backward=True) - 1
    monkeypatch.setattr(Budget, "refuses_modules", lambda *_, **__: "")
    monkeypatch.setattr("prepare.stages.verify.compare_modules._time_is_over", lambda _: True)
    checks = {item.what: item for item in check(model, FLAT, batch, memory=memory).checks}
    assert checks["module outputs"].note == (
        "5 modules not compared alone, first 0: no time was left; raise verify.seconds"
    )


def test_a_large_model_has_more_time_by_the_pace_of_a_forward(monkeypatch):
    model, batch = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 32, 32)
    monkeypatch.setattr(Cost, "seconds", lambda *_, **__: 100.0)
    assert check(model, FLAT, batch).status == "pass"
    assert "raise verify.seconds" in check(model, FLAT, batch, seconds=30.0).reason


def test_a_float64_convolution_is_estimated_with_its_unfolding():
    model, batch = nn.Conv3d(4, 8, 3, padding=1), torch.randn(2, 4, 16, 16, 16)
    cost = estimated(model, batch)
    assert cost.unfolded == {False: [27 * batch.numel()]}
    assert cost.operations == 2 * 27 * 4 * 8 * 2 * 16**3
    assert cost.bytes(torch.float64, backward=False) > 27 * batch.numel() * 8
    assert cost.bytes(torch.bfloat16, backward=False) < 27 * batch.numel() * 2


def test_the_estimate_runs_the_model_if_shapes_are_not_enough():
    class Looks(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) < 1e9 else x

    assert estimated(Looks(3, 4, 3), torch.randn(1, 3, 8, 8)).operations > 0


def test_the_estimate_needs_only_shapes_and_gives_no_warning():
    kinds = []

    def draw(x):
        warnings.warn("a model's own", stacklevel=1)
        kinds.append(type(x))
        return x * torch.rand_like(x)

    assert estimated(Draws(draw), torch.randn(2, 3, 8, 8)).operations > 0
    assert [kind.__name__ for kind in kinds] == ["FakeTensor"]


def test_a_budget_says_why_a_run_does_not_fit():
    budget = Budget(10.0, 2**20)
    large = Cost(elements=2**20)
    assert "4.0 MiB, " in budget.refuses(large, torch.float32, backward=False)
    assert "a call in float64 takes about" in budget.refuses(Cost(operations=10**12), torch.float64)
    assert budget.refuses(Cost(elements=10), torch.float32) == ""


@pytest.mark.parametrize(
    ("took", "left", "ending"),
    [(1.0, 1.5, ""), (4.0, 3.0, "about 4 s, but 3 of 7 s are left; raise verify.seconds")],
)
def test_the_time_of_a_run_scales_the_next_estimate(monkeypatch, took, left, ending):
    now = [0.0]
    monkeypatch.setattr("prepare.stages.verify.execution.budget.time.monotonic", lambda: now[0])
    budget, cost = Budget(took + left, 2**30), Cost(operations=6 * 10**9)  # by the estimate 2 s
    with budget.timing(cost, torch.float64, backward=False):
        now[0] += took
    refusal = budget.refuses(cost, torch.float64, backward=False)
    assert refusal.endswith(ending)
    assert bool(refusal) == bool(ending)
    assert budget.refuses(cost, torch.float32, backward=False) == ""


@pytest.mark.parametrize(
    ("clock", "own", "left"), [(10.0, 4.0, 26.0), (10.0, 20.0, 20.0), (295.0, 10.0, 0.2)]
)
def test_the_time_of_other_programs_does_not_count(monkeypatch, clock, own, left):
    now = {"monotonic": 0.0, "process_time": 0.0}
    for name in now:
        monkeypatch.setattr(
            f"prepare.stages.verify.execution.budget.time.{name}", lambda name=name: now[name]
        )
    budget, given = Budget(30.0, 2**30, longest=300.0), Budget(30.0, 2**30)
    now |= {"monotonic": clock, "process_time": own}
    assert budget.left() == pytest.approx(left, abs=0.05)
    assert given.left() == 30.0 - clock


def test_only_a_limit_that_was_not_given_leaves_out_other_programs(monkeypatch):
    made = []
    monkeypatch.setattr(
        check_model, "Budget", lambda *a, **k: made.append(Budget(*a, **k)) or made[-1]
    )
    for limit in ({}, {"seconds": 30.0}):
        check(nn.Conv2d(3, 4, 3), FLAT, torch.randn(2, 3, 8, 8), **limit)
    assert [budget.longest for budget in made] == [300.0, 0.0]
