"""What every registered step must hold to, tested once over the registry."""

import dataclasses
import inspect
import pickle

import pytest
import torch
import yaml
from torch import nn

from networks import CONF, facts, mixed, tensors
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.step import TensorStep
from prepare.tensors import named_tensors

# Options under which a step has something to do, where its defaults leave the model alone.
OPTIONS = {
    "input_format": {"memory_format": "by_rank", "attach": True},
    "device": {"device": "cpu"},
    "repair_layout": {"force": True},
}
NAMES = list(STEPS)


def pipeline(name: str) -> Pipeline:
    return Pipeline.from_config({name: OPTIONS.get(name, {})})


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_touches_nothing_and_is_the_same_twice(name):
    model = mixed()
    before = facts(model)
    first, second = pipeline(name).plan(model), pipeline(name).plan(model)
    assert first.to_dict() == second.to_dict()
    assert facts(model) == before


@pytest.mark.parametrize("name", [name for name in NAMES if issubclass(STEPS[name], TensorStep)])
def test_want_is_pure(name):
    model = mixed()
    before = facts(model)
    step = STEPS[name].from_options(OPTIONS.get(name, {})).settle()
    for tensor in named_tensors(model):
        assert step.want(tensor) == step.want(tensor)
    assert facts(model) == before


@pytest.mark.parametrize("name", NAMES)
def test_only_what_the_plan_named_changes(name):
    model = mixed()
    before = facts(model)
    plan = pipeline(name).plan(model)
    pipeline(name).apply(model, known_issues="ignore")
    named = {f"{t.module}.{t.tensor}".lstrip(".") for t in plan.tensors if t.changes}
    changed = {key for key, fact in facts(model).items() if fact != before[key]}
    modules = {module for action in plan.actions for module in action.modules}
    assert {key for key in changed if ":" not in key} == named
    assert {key.partition(":")[0] for key in changed if ":" in key} == modules
    # A module stays the same object: it gets a class or a hook.
    assert {key.partition(":")[2] for key in changed if ":" in key} <= {
        "class",
        "_forward_pre_hooks",
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_as_planned(name):
    model = mixed()
    plan = pipeline(name).plan(model)
    pipeline(name).apply(model, known_issues="ignore")
    after = tensors(model)
    for planned in plan.tensors:
        tensor = after[f"{planned.module}.{planned.tensor}".lstrip(".")]
        assert planned.new == (tensor.stride(), str(tensor.dtype)[6:], str(tensor.device))


@pytest.mark.parametrize("name", NAMES)
def test_afterwards_the_plan_is_empty_and_twice_is_once(name):
    model = mixed()
    pipeline(name).apply(model, known_issues="ignore")
    once = facts(model)
    assert not pipeline(name).plan(model)
    pipeline(name).apply(model, known_issues="ignore")
    assert facts(model) == once


@pytest.mark.parametrize("name", NAMES)
def test_the_model_its_parameters_and_ties_keep_their_identity(name):
    model = mixed()
    objects = {path: id(tensor) for path, tensor in tensors(model).items()}
    seen = []
    model["flat"][0].weight.register_hook(seen.append)
    assert pipeline(name).apply(model, known_issues="ignore") is model
    assert {path: id(tensor) for path, tensor in tensors(model).items()} == objects
    assert model["tied"].head.weight is model["tied"].embedding.weight
    model["flat"][0].weight.float().sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_yaml_spells_out_every_field_with_its_default(name):
    written = yaml.safe_load((CONF / "steps" / f"{name}.yaml").read_text())
    assert written == {name: STEPS[name]().options()}


@pytest.mark.parametrize("name", NAMES)
def test_options_round_trip_and_a_step_is_frozen_plain_and_picklable(name):
    step = STEPS[name].from_options(OPTIONS.get(name, {}))
    assert STEPS[name].from_options(step.options()) == step
    assert pickle.loads(pickle.dumps(step)) == step
    for field in dataclasses.fields(step):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(step, field.name, None)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_is_a_card(name):
    card = inspect.getdoc(STEPS[name])
    for part in ("Helps:", "Hurts:", "Source:"):
        assert part in card
    assert STEPS[name].name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_anything_to_prepare_is_left_alone(name):
    model = nn.Sequential()
    pipeline(name).apply(model, strict=False, known_issues="ignore")
    assert list(model.parameters()) == []


@pytest.mark.parametrize("name", [name for name in NAMES if issubclass(STEPS[name], TensorStep)])
def test_a_plan_works_on_the_meta_device(name):
    with torch.device("meta"):
        model = mixed()
    plan = pipeline(name).plan(model)
    assert {t.old.device for t in plan.tensors} == {"meta"}
    assert [t.new.stride for t in plan.tensors] == [
        t.new.stride for t in pipeline(name).plan(mixed()).tensors
    ]
