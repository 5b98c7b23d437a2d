"""A failure at any point of a pipeline leaves the model unchanged."""

import pytest
import torch
from torch import nn

from failing_operations import FailAt, first_middle_and_last, interrupt_at
from prepare.audit import audit
from prepare.errors import PartialError
from prepare.models.unet import UNet2d
from prepare.pipeline import Pipeline, relayout
from prepare.stages.flow import observe, predict
from prepare.step import ModuleStep
from small_nets import Flag, Tied, facts, mixed, same, small_2d, small_3d

STEPS_USED = {
    "marks": {},
    "repair_layout": {},
    "half": {"keep": []},
    "conv2d_memory_format": {},
    "conv3d_memory_format": {},
    "flag": {},
    "input_format": {"attach": True},
}
# An optimizer cannot train parameters in float16.
TRAINED = STEPS_USED | {"half": {"keep": [], "dtype": "bfloat16"}}
ERRORS = [RuntimeError("no"), MemoryError(), torch.OutOfMemoryError("no"), KeyboardInterrupt()]


def weighted():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Linear(2, 2)
    )
    model[1].register_forward_hook(print)
    model[1].weight.register_hook(print)
    return model


def sharing():
    model = nn.ModuleDict({"a": nn.Conv2d(4, 4, 3), "b": nn.Conv2d(4, 4, 3), "tied": Tied()})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    return model


def network():
    return UNet2d(width=4, depth=2, norm="instance")


ZOO = {
    "2-d": small_2d,
    "3-d": small_3d,
    "mixed": mixed,
    "computed": weighted,
    "sharing": sharing,
    "network": network,
}


@pytest.fixture(autouse=True)
def _steps_of_every_kind(plugin):
    @plugin("marks")
    class Marks(ModuleStep):
        """Changes the class of every linear layer, in place, and puts a new module beside it."""

        def targets(self, model):
            return [n for n, m in model.named_modules() if type(m) is nn.Linear]

        def rewrite(self, model, name):
            module = model.get_submodule(name)
            module.__class__ = Marked
            module.register_forward_pre_hook(print)
            return {name: module}

    plugin("flag")(Flag)


class Marked(nn.Linear):
    """A linear layer that a structure step has changed."""


def state(model):
    attributes = {f"{n}:attributes": sorted(vars(m)) for n, m in model.named_modules()}
    return facts(model) | attributes


@pytest.mark.parametrize("make", ZOO.values(), ids=ZOO)
def test_a_failure_at_any_torch_operation_leaves_the_model_as_it_was(make):
    model, pipeline = make(), Pipeline.from_config(STEPS_USED)
    before = state(model)
    number, failed = 0, 0
    while True:
        number += 1
        error = ERRORS[number % len(ERRORS)]
        try:
            with FailAt(number, error) as mode:
                pipeline.apply(model, known_issues="ignore")
        except BaseException as raised:
            # A failing operation inside a step's `want` is reported as the step's fault.
            assert raised is error or raised.__cause__ is error
            assert state(model) == before, f"after operation {number}"
            failed += 1
            continue
        break
    assert failed >= mode.count > 10 or failed > 10
    assert not pipeline.plan(model)


def test_the_zoo_has_at_least_five_hundred_operations_to_fail_at():
    operations = 0
    for make in ZOO.values():
        with FailAt(-1, None) as mode:
            Pipeline.from_config(STEPS_USED).apply(make(), known_issues="ignore")
        operations += mode.count
    assert operations >= 500


def trained(make):
    """Return a model and an optimizer with state of its own."""
    model = make()
    parameters = [each for each in model.parameters() if each.is_floating_point()]
    optimizer = torch.optim.Adam(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def has_hook(optimizer):
    hooks = optimizer._optimizer_load_state_dict_post_hooks.values()
    return relayout in hooks


def strides_of_state(optimizer):
    return [t.stride() for state in optimizer.state.values() for t in state.values()]


def interrupted(make, lines):
    """Interrupt one apply at each of `lines`; return the number of interrupts."""
    pipeline = Pipeline.from_config(TRAINED)
    times = 0
    for line in lines:
        model, optimizer = trained(make)
        before = state(model), strides_of_state(optimizer), False
        try:
            with interrupt_at(line):
                pipeline.apply(model, optimizer=optimizer, known_issues="ignore")
        except KeyboardInterrupt:
            times += 1
            now = state(model), strides_of_state(optimizer), has_hook(optimizer)
            if now != before:  # prepared whole
                assert not pipeline.plan(model), f"line {line}"
                assert not pipeline.check(model, optimizer=optimizer), f"line {line}"
                assert has_hook(optimizer), f"line {line}"
    return times


def lines_of(make):
    pipeline = Pipeline.from_config(TRAINED)
    # Fill the caches first.
    pipeline.apply(make(), known_issues="ignore")
    model, optimizer = trained(make)
    places = []
    with interrupt_at(-1, places):
        pipeline.apply(model, optimizer=optimizer, known_issues="ignore")
    return places


def a_tenth(places):
    """Return the numbers of ten lines or a few more."""
    return range(1, len(places), max(1, len(places) // 10))


# Which lines: ten of them, and in the full counts every one.
each_choice = pytest.mark.parametrize(
    "choose", [a_tenth, pytest.param(first_middle_and_last, marks=pytest.mark.slow)]
)


@each_choice
@pytest.mark.filterwarnings("ignore::prepare.errors.UntrainedWarning")
@pytest.mark.parametrize("make", ZOO.values(), ids=ZOO)
def test_an_interrupt_at_any_line_leaves_the_model_whole(make, choose):
    lines = choose(lines_of(make))
    assert len(lines) > 500 or choose is a_tenth
    assert interrupted(make, lines) == len(lines)


def traced():
    """Return a model that the step fuse_conv_bn traces without data."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


CALLS = {
    "plan": lambda model: Pipeline.from_config({"fuse_conv_bn": {}, **STEPS_USED}).plan(
        model, known_issues="ignore"
    ),
    "audit": audit,
    "predict": lambda model: predict(model, torch.zeros(2, 3, 8, 8)),
    "observe": lambda model: observe(model, torch.zeros(2, 3, 8, 8)),
    "apply": lambda model: Pipeline.from_config({"fuse_conv_bn": {}}).apply(model),
}


@each_choice
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_of_a_call_leaves_nothing(name, choose):
    call = CALLS[name]
    call(traced())
    places = []
    with interrupt_at(-1, places):
        call(traced())
    lines, times = choose(places), 0
    for line in lines:
        model = traced()
        before = state(model)
        try:
            with interrupt_at(line):
                call(model)
        except KeyboardInterrupt:
            times += 1
        if name != "apply":
            assert state(model) == before, f"line {line}"
    assert times == len(lines)


def test_an_interrupt_during_the_exchange_is_deferred():
    """The lines of one apply during which tensors are exchanged or restored."""
    within = ("run", "undo", "restore", "held_interrupts", "_refill")
    lines = [n for n, place in enumerate(lines_of(small_2d), 1) if place[2] in within]
    assert len(lines) > 20
    assert interrupted(small_2d, lines) == len(lines)


# Giving the old tensors up


def test_with_low_memory_the_error_names_what_has_changed():
    model = small_2d()
    before = facts(model)
    pipeline = Pipeline.from_config({"half": {"keep": []}})
    with pytest.raises(PartialError) as caught, FailAt(9, RuntimeError("no")):
        pipeline.apply(model, low_memory=True, known_issues="ignore")
    changed = [name for name, fact in facts(model).items() if fact != before[name]]
    assert sorted(caught.value.changed) == sorted(changed) != []
    assert set(caught.value.unchanged) == {
        f"{t.module}.{t.tensor}" for t in pipeline.plan(model).tensors if t.changes
    }
    assert "changed: 0.weight" in str(caught.value)
    pipeline.apply(model, low_memory=True, known_issues="ignore")
    assert not pipeline.plan(model)


def test_low_memory_gives_the_same_model():
    one, other = mixed(), mixed()
    other.load_state_dict(one.state_dict())
    steps = {"half": {}, "conv2d_memory_format": {}, "conv3d_memory_format": {}}
    Pipeline.from_config(steps).apply(one, known_issues="ignore")
    Pipeline.from_config(steps).apply(other, low_memory=True, known_issues="ignore")
    same(one, other)
