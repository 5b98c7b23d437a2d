"""The contract that authors inherit: each of its tests fails for a step that breaks its property."""

from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from prepare.step import InputStep, ModelStep, ModuleStep, TensorStep, Want
from prepare.testing import StepContract

PROPERTIES = [name for name in vars(StepContract) if name.startswith("test_")]
CARD = "Does it. Helps: much. Hurts: little. Source: here."


class Casts(TensorStep):
    __doc__ = CARD

    def want(self, tensor):
        return Want(dtype="bfloat16") if isinstance(tensor.module, nn.Embedding) else None


def wanting(want):
    """Return a step that asks `want(step, tensor)`."""
    return type("Wanting", (Casts,), {"__doc__": CARD, "want": want})


def write_in_want(step, tensor):
    tensor.tensor.data = tensor.tensor.data.clone().zero_()


BFLOAT16, ANSWERS = Want(dtype="bfloat16"), count()
Idle, WritesInWant = wanting(lambda step, tensor: None), wanting(write_in_want)
ChangesItsMind = wanting(lambda step, tensor: BFLOAT16 if next(ANSWERS) % 2 else None)
NeedsNumbers = wanting(
    lambda step, each: (
        BFLOAT16 if each.tensor.dtype.is_floating_point and each.tensor.sum() > 0 else None
    )
)


class Acts(ModelStep):
    """Sets a flag on the model; what else it does is for those that derive from it."""

    __doc__ = CARD

    def targets(self, model):
        return () if getattr(model, "done", False) else ("flat",)

    def act(self, model):
        model.done = True
        self.more(model)

    def more(self, model):
        model["flat"].register_forward_hook(print)


def acting(more):
    """Return a step that also does `more` to the model."""
    return type("Acting", (Acts,), {"__doc__": CARD, "more": lambda _, model: more(model)})


class NeverDone(Acts):
    __doc__ = CARD

    def targets(self, model):
        return ("flat",)


class LooksInside(Acts):
    __doc__ = CARD

    def targets(self, model):
        return () if model["flat"][0].stride == (2, 2) else ("flat",)


class NewEmbedding(nn.Embedding):
    pass


class Replaces(ModuleStep):
    __doc__ = CARD

    def targets(self, model):
        return [name for name, module in model.named_modules() if type(module) is nn.Embedding]

    def rewrite(self, model, name):
        return {name: NewEmbedding(4, 6)}


class FormatsInPlace(InputStep):
    __doc__ = CARD

    def format(self, batch):
        batch["image"].mul_(2)
        return batch


class HoldsAnObject(Acts):
    __doc__ = CARD
    what: Any = torch.float16


class HoldsASet(Acts):
    __doc__ = CARD
    what: Any = frozenset({1})


class NoCard(Casts):
    """Casts."""


ZEROES_ANOTHER = acting(lambda model: model["deep"][0].weight.data.zero_())
CASTS_ANOTHER = acting(lambda model: model["deep"].double())
WRITES_INTO = acting(lambda model: model["flat"][0].weight.data.zero_())
HOOKS_A_LAMBDA = acting(lambda model: model["flat"].register_forward_hook(lambda *_: None))
# For each property: a step that breaks it, and the message of the failing test.
BROKEN = {
    "test_it_has_something_to_do_here": (Idle, "give `options` with which it changes"),
    "test_a_plan_touches_nothing_and_is_the_same_twice": (WritesInWant, "planning changed"),
    "test_want_is_pure": (ChangesItsMind, "two answers"),
    "test_only_what_the_plan_named_changes": (
        ZEROES_ANOTHER,
        r"not in the plan: \['deep.0.weight'",
    ),
    "test_every_tensor_is_as_planned": (CASTS_ANOTHER, "deep.0.bias was planned as"),
    "test_afterwards_the_plan_is_empty_and_twice_is_once": (
        NeverDone,
        "still has work to do on flat",
    ),
    "test_the_model_its_parameters_and_ties_keep_their_identity": (Replaces, "is another object"),
    "test_a_failure_afterwards_leaves_the_model_as_it_was": (WRITES_INTO, "changed flat.0.weight"),
    "test_a_prepared_model_can_be_copied_and_pickled": (HOOKS_A_LAMBDA, "pickle|local object"),
    "test_a_model_without_anything_to_prepare_is_left_alone": (
        LooksInside,
        "object cannot be interpreted",
    ),
    "test_a_plan_works_on_the_meta_device": (NeedsNumbers, "meta"),
    "test_formatting_leaves_the_batch_as_it_was": (FormatsInPlace, "changed the batch"),
    "test_options_round_trip_and_a_step_is_frozen_plain_and_picklable": (
        HoldsAnObject,
        "another step",
    ),
    "test_a_recipe_of_it_can_be_saved_and_loaded": (HoldsASet, "plain data"),
    "test_the_docstring_is_a_card": (NoCard, "has no Helps:, Hurts:, Source:"),
}


def run(name, tmp_path, **members):
    """One test of the contract, as pytest would call it."""
    test = getattr(type("TestIt", (StepContract,), members)(), name)
    test(tmp_path) if "tmp_path" in test.__code__.co_varnames else test()


def test_every_property_has_a_step_here_that_breaks_it():
    assert sorted(BROKEN) == sorted(PROPERTIES)


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_step_that_breaks_a_property_fails_its_test(plugin, tmp_path, name):
    step, said = BROKEN[name]
    plugin("broken")(step)
    with pytest.raises(Exception, match=said):
        run(name, tmp_path, step="broken")


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_step_that_breaks_none_passes(plugin, tmp_path, name):
    plugin("sound")(Casts)
    run(name, tmp_path, step="sound")


def test_options_a_network_and_a_batch_may_be_given(plugin, tmp_path):
    @plugin("scales")
    class Scales(InputStep):
        """Scales. Helps: much. Hurts: little. Source: here."""

        key: str

        def format(self, batch):
            return {**batch, self.key: batch[self.key] / 2}

    members = {"options": {"key": "mine"}, "batch": lambda self: {"mine": torch.ones(2)}}
    run("test_formatting_leaves_the_batch_as_it_was", tmp_path, step="scales", **members)
    with pytest.raises(KeyError, match="other"):
        run("test_formatting_leaves_the_batch_as_it_was", tmp_path, step="scales",
            **members | {"options": {"key": "other"}})  # fmt: skip
    embedding = {"model": lambda self: nn.Sequential(nn.Linear(2, 2))}
    plugin("sound")(Casts)
    with pytest.raises(AssertionError, match="override `model`"):
        run("test_it_has_something_to_do_here", tmp_path, step="sound", **embedding)
