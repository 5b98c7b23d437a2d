"""A call that we make leaves a model, its inputs and the process as they were, bit for bit."""

import contextlib
import copy
import random

import numpy as np
import pytest
import torch._dynamo  # its first import, by a fake tensor, adds a filter of warnings
from torch import nn

import stateful_nets
from fingerprint import difference, fingerprint, process_state
from prepare.core.forward.example_input import Example
from prepare.core.forward.run_example import run_example
from prepare.core.forward.unchanged import unchanged
from prepare.errors import ModelError
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare
from prepare.stages.flow import observe, predict
from prepare.stages.verify import verify
from stateful_nets import STATEFUL, Random

FLAT = {"conv2d_memory_format": {}, "input_format": {}}


def batch():
    return torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


def run(model, reference, pipeline, x):
    return run_example(model, Example((pipeline.format(x),)))


CALLS = {
    "run": run,
    "observe": lambda m, r, p, x: observe(m, p.format(x)),
    "predict": lambda m, r, p, x: predict(m, p.format(x)),
    "verify": lambda m, r, p, x: verify(r, m, x, pipeline=p),
    "verify in training": lambda m, r, p, x: verify(r, m, x, pipeline=p, mode="train"),
    "bench": lambda m, r, p, x: compare({"a": r, "b": m}, x, format={"b": p.format}, budget=0.02),
    "bench in training": lambda m, r, p, x: compare({"a": r, "b": m}, x, train=True, budget=0.02),
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
    """Return the output of a call that begins with the same random numbers."""
    with unchanged(nn.Identity()):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        return net(batch()).clone()


@pytest.mark.parametrize("part", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(STATEFUL))
def test_no_kind_of_state_is_changed_by_a_call_of_ours(name, part):
    others = ["predict", "verify", "bench", "bench in training"]
    if part:  # another one for each kind
        others = [others[sorted(STATEFUL).index(name) % len(others)]]

    class Net(nn.Sequential):
        pass

    assert_leaves_nothing(
        lambda: Net(nn.Conv2d(3, 4, 1), STATEFUL[name]()),
        train=name in ("Statistics", "Modes"),
        calls=["run", "observe", *others],
    )


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 60))]
)
def test_random_models_with_state_are_as_before(block):
    others = sorted({*CALLS} - {"run", "observe"})
    for seed in range(10 * block, 10 * block + 10):
        calls = ["run", "observe", others[seed % len(others)]]
        assert_leaves_nothing(lambda seed=seed: Random(seed), train=seed % 3 == 0, calls=calls)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["run", "observe", "verify", "bench"])
def test_a_forward_that_stops_halfway_leaves_nothing(name, error):
    class Stops(nn.Module):
        stops = False

        def forward(self, x):
            if Stops.stops:
                raise error("stopped")
            return x

    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Conv2d(3, 4, 1), STATEFUL["KeyValues"](), STATEFUL["ParameterData"](), Stops()
    )
    reference.eval()
    model, pipeline = copy.deepcopy(reference), Pipeline.from_config(FLAT)
    pipeline.apply(model)
    before = fingerprint(model), fingerprint(reference), process_state()
    Stops.stops = True
    expected = error if error is KeyboardInterrupt else (ModelError, ValueError)
    quiet = name in ("verify", "bench") and error is ValueError  # these report it
    with contextlib.nullcontext() if quiet else pytest.raises(expected):
        CALLS[name](model, reference, pipeline, batch())
    Stops.stops = False
    assert not difference((fingerprint(model), fingerprint(reference), process_state()), before)


def test_arguments_that_a_forward_writes_are_restored():
    class Caches(stateful_nets.Base):
        def forward(self, x, cache, options):
            cache.layers[0]["keys"].fill_(3)
            cache.length += 1
            options["seen"] = x
            return self.conv(x)

    x, cache, options = torch.randn(1, 4, 3, 3), stateful_nets.Cache(), {}
    cache.layers = [{"keys": torch.zeros(1)}]
    given = [cache, options]
    before = fingerprint(given)
    run_example(Caches(), Example((x, cache), {"options": options}))
    observe(Caches(), Example((x, cache), {"options": options}))
    assert not difference(fingerprint(given), before)


def test_memory_that_several_tensors_share_is_restored_once():
    net = nn.Module()
    net.whole = torch.arange(6.0)
    net.part, net.wide = net.whole[2:4], net.whole[:1].expand(5)
    net.register_buffer("turned", net.whole.view(2, 3).t())
    with unchanged(net):
        net.part.data.fill_(torch.nan)
        net.turned.data.resize_(20).zero_()
    assert net.whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert net.turned.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_an_array_of_the_users_is_not_copied():
    class Data:
        def __init__(self):
            self.images = np.zeros(100)

    net = nn.Identity()
    net.images, net.data = np.zeros(100), Data()
    images = net.images
    with unchanged(net):
        net.images[0] = net.data.images[0] = 1
    assert net.images is images
    assert images[0] == net.data.images[0] == 1
