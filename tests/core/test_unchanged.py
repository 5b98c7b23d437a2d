"""A call that we make leaves a model, its inputs and the process as they were, bit for bit."""

import contextlib
import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

import stateful_nets
from fingerprint import difference, fingerprint, process_state
from prepare import Workload
from prepare.core.forward.call import Call
from prepare.core.forward.example_input import Example
from prepare.core.forward.gradient_strides import gradient_strides
from prepare.core.forward.run_example import run_example
from prepare.core.forward.unchanged import unchanged
from prepare.errors import ModelError
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare
from prepare.stages.export.exportable import capture
from prepare.stages.export.reference import outputs_of
from prepare.stages.flow import observe, predict
from prepare.stages.verify import verify
from stateful_nets import STATEFUL, Random

FLAT = {"conv2d_memory_format": {}, "input_format": {}}


def batch():
    return torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


def run(model, reference, pipeline, x):
    return run_example(model, Example((pipeline.format(x),)))


def look(model, reference, pipeline, x):
    with pipeline.guard(model) as guard:
        guard.look(Workload([pipeline.format(x)]))


def export(model, reference, pipeline, x):
    with contextlib.suppress(Exception):  # torch.export refuses most of them
        outputs_of(model, Call((x,), {}))
        capture(model, Call((x,), {}), ())


CALLS = {
    "run": run,
    "observe": lambda m, r, p, x: observe(m, p.format(x)),
    "predict": lambda m, r, p, x: predict(m, p.format(x)),
    "observe backward": lambda m, r, p, x: observe(m, p.format(x), backward=True),
    "verify": lambda m, r, p, x: verify(r, m, x, pipeline=p),
    "verify in training": lambda m, r, p, x: verify(r, m, x, pipeline=p, mode="train"),
    "bench": lambda m, r, p, x: compare({"a": r, "b": m}, x, format={"b": p.format}, budget=0.02),
    "metric": lambda m, r, p, x: verify(
        r, m, x, pipeline=p, metric=lambda net, given: float(net(given).mean()), max_drop=1.0
    ),
    "gradient strides": lambda m, r, p, x: gradient_strides(m, p.format(x), amp="none"),
    "look": look,
    "export": export,
}


@pytest.fixture(autouse=True)
def _flags_of_this_process():
    with unchanged(nn.Identity()):
        yield


def assert_leaves_nothing(build, *, train, calls):
    """Call prepared and unprepared model; compare them with before, and their next calls with those of twins."""
    torch.manual_seed(0)
    reference = build()
    reference.train(train)
    model = Pipeline.from_config(FLAT).apply(copy.deepcopy(reference))
    pipeline, x = Pipeline.from_config(FLAT), batch()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    models, twins = (model, reference), (copy.deepcopy(model), copy.deepcopy(reference))
    before = [fingerprint(each) for each in (*models, x)], process_state()
    for name in calls:
        with contextlib.suppress(
            ModelError
        ):  # a changed input or parameter cannot be differentiated
            CALLS[name](model, reference, pipeline, x)
        after = [fingerprint(each) for each in (*models, x)], process_state()
        assert not difference(after, before), name
    for each, twin in zip(models, twins, strict=True):
        with torch.no_grad():
            own, other = ([fresh(net) for _ in range(2)] for net in (each, twin))
        assert all(map(torch.equal, own, other))


def fresh(net):
    """Return the output of a call that begins with the same class attributes and random numbers."""
    with unchanged(nn.Identity()):
        stateful_nets.OfTheClass.total, stateful_nets.OfTheClass.found = 0, []
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        return net(batch()).clone()


@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_no_kind_of_state_is_changed_by_a_call_of_ours(name):
    class Net(nn.Sequential):
        pass

    assert_leaves_nothing(
        lambda: Net(nn.Conv2d(3, 4, 1), STATEFUL[name]()),
        train=name in ("Statistics", "Modes"),
        calls=["run", "observe", "predict", "verify", "bench", "look", "export"],
    )


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_random_models_with_state_are_as_before(count):
    others = itertools.cycle(sorted({*CALLS} - {"run", "observe"}))
    for seed in range(count):
        calls = ["run", "observe", next(others)]
        assert_leaves_nothing(lambda seed=seed: Random(seed), train=seed % 3 == 0, calls=calls)
