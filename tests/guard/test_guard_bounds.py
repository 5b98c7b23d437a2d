"""Test the bounds of a guard: time, memory, turns, and sizes that are looked at in advance."""

import re

import pytest
import torch

from guarded import ALL, add, images, prepared, train
from prepare import Workload
from prepare.errors import GuardError, RefusedError


def test_what_is_not_looked_at_in_time_is_looked_at_in_later_calls():
    pipeline, model = prepared()
    with pipeline.guard(model, seconds=1e-9) as guard, torch.no_grad():
        model(images())
        assert guard.looks == 0
    with pipeline.guard(model, seconds=600.0) as guard, torch.no_grad():
        model(images())
        assert guard.looks == len(guard.watched)


def test_a_module_that_needs_too_much_memory_is_named():
    pipeline, model = prepared()
    with pipeline.guard(model, max_bytes=40_000) as guard, torch.no_grad():
        model(images())
    assert "it needs" in guard.left_out["0"]
    assert "left out  0: it needs" in repr(guard)


def test_the_sizes_of_a_workload_are_looked_at_in_advance():
    pipeline, model = prepared()
    batches = [images(16), images(24)]
    with torch.no_grad(), pipeline.guard(model, seconds=1e-9) as guard:
        guard.look(Workload(batches))
        assert guard.looks == 2 * len(guard.watched)
        for batch in batches:
            model(batch)
        assert guard.looks == 2 * len(guard.watched)
        add(model[6])
        with pytest.raises(GuardError, match="6: its outputs"):
            guard.look(images(32))


def test_a_first_call_in_serving_is_looked_at_whatever_the_share():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=1, share=1e-9) as guard:
        train(model, guard, 3)
        looks = guard.looks
        with torch.no_grad():
            model.eval()(images(24))
        assert guard.looks == looks + len(guard.watched)


def test_modules_have_their_turn_though_each_step_has_another_shape():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=16, share=ALL) as guard:
        looked_at = set()
        for size in range(12, 44):
            model(images(size)).mean().backward()
            looked_at |= guard._chosen
    assert looked_at == set(guard.watched)


def test_each_shape_has_its_share_of_the_looks_in_training():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=16, share=ALL) as guard:
        for _ in range(16):
            train(model, guard, 1, images(16))
            train(model, guard, 1, images(20))
        assert "each once in 16 steps, without a limit of the time" in repr(guard)
    assert sorted(key.looks for key in guard._turns.keys.values()) == [len(guard.watched)] * 2


def test_looks_in_training_take_their_share_of_the_time(caplog):
    caplog.set_level("INFO", "prepare.guard")
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=1, share=1e-9) as guard:
        train(model, guard, 3)
        assert guard.looks == len(guard.watched)  # all of the first step, when no time was spent
    said = re.compile(r"once in about [\d,]+ steps, not 1, in at most 1e-07 % of the time")
    assert said.search(repr(guard))
    assert said.search(caplog.text)


def test_wrong_options_are_refused():
    pipeline, model = prepared()
    for options, text in {
        "on_difference": ("stop", "on_difference: 'stop' is not allowed"),
        "seconds": (0.0, "seconds: 0.0 is not above 0"),
        "max_bytes": (0, "max_bytes: 0 is not at least 1"),
        "share": (0.0, "share: 0.0 is not above 0"),
        "every": (0, "every: 0 is not at least 1"),
    }.items():
        with pytest.raises(RefusedError, match=text[1]):
            pipeline.guard(model, **{options: text[0]})
    assert len(model._forward_pre_hooks) == 1
