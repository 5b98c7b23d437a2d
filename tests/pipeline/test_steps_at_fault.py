"""Steps that are at fault, or in conflict with another one."""

import pytest
import torch
from torch import nn

from prepare.errors import ConflictError, RefusedError, StepError
from prepare.pipeline import Pipeline
from prepare.step import ModelStep, TensorStep, Want


def test_a_conflict_of_two_steps_names_both(plugin):
    @plugin("brain")
    class Brain(TensorStep):
        """Casts all to bfloat16."""

        def want(self, tensor):
            return Want(dtype=torch.bfloat16)

    model = nn.Linear(2, 2)
    with pytest.raises(ConflictError) as caught:
        Pipeline.from_config({"half": {}, "brain": {}}).plan(model)
    assert [str(problem) for problem in caught.value.problems] == [
        f"{name}: half wants float16, and brain wants bfloat16; drop one step, or exclude the module"
        for name in ("weight", "bias")
    ]


@pytest.mark.parametrize(
    ("want", "message"),
    [
        (
            Want(memory_format="channels_last"),
            "returned channels_last for a tensor of 2 dimensions",
        ),
        (
            Want(memory_format="diagonal"),
            "returned the memory format 'diagonal', which is not one of",
        ),
        (Want(dtype="float17"), "returned the dtype 'float17', which torch does not have"),
        ("float16", "want\\(\\) returned 'float16'; return a Want or None"),
        (None, None),
    ],
)
def test_a_step_that_wants_the_impossible_is_at_fault(plugin, want, message):
    @plugin("odd")
    class Odd(TensorStep):
        """Wants the parametrized value."""

        def want(self, tensor):
            return want

    pipeline = Pipeline.from_config({"odd": {}})
    if message is None:
        assert not pipeline.plan(nn.Linear(2, 2))
        return
    with pytest.raises(StepError, match=f"steps.odd: .*{message}"):
        pipeline.plan(nn.Linear(2, 2))


def test_a_step_that_raises_is_named_with_the_tensor(plugin):
    @plugin("broken")
    class Broken(TensorStep):
        """Raises."""

        def want(self, tensor):
            raise KeyError(tensor.name)

    with pytest.raises(
        StepError, match="steps.broken: want\\(\\) raised on weight: KeyError: 'weight'"
    ):
        Pipeline.from_config({"broken": {}}).plan(nn.Linear(2, 2))


def test_a_step_that_never_finishes_is_at_fault(plugin):
    @plugin("endless")
    class Endless(ModelStep):
        """Always has a target."""

        def targets(self, model):
            return ("",)

        def act(self, model):
            pass

    with pytest.raises(StepError, match="steps.endless: still has work to do"):
        Pipeline.from_config({"endless": {}}).apply(nn.Linear(1, 1))


class Locked(nn.Sequential):
    locked = False

    def __setattr__(self, name, value):
        if self.locked:
            raise TypeError("no")
        super().__setattr__(name, value)


@pytest.mark.parametrize("step", ["eval_mode", "compile"])
def test_a_model_that_lets_nobody_change_it_is_refused(step):
    model = Locked(nn.Conv2d(3, 4, 1))
    model.__dict__["locked"] = True
    at = r"test_steps_at_fault.py:\d+, in __setattr__: TypeError: no; prepare it before"
    with pytest.raises(RefusedError, match=rf"^steps.{step}: the model lets nobody .*{at}"):
        Pipeline.from_config({step: {}}).apply(model)
    assert model.training
