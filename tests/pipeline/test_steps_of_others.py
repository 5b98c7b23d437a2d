"""Steps of others: their order, plans on a copy, failures, and who is at fault."""

import pytest
import torch
from torch import nn

from prepare.errors import ConflictError, StepError
from prepare.pipeline import Pipeline
from prepare.step import ModelStep, ModuleStep, TensorStep, Want
from small_nets import Flag, facts


@pytest.fixture
def marks(plugin):
    """Two structure steps that note their order, and a runtime step."""

    def structure(name):
        @plugin(name)
        class Mark(ModuleStep):
            """Notes its name on every linear layer."""

            def targets(self, model):
                linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
                return [n for n, m in linear if name not in getattr(m, "marks", ())]

            def rewrite(self, model, path):
                module = model.get_submodule(path)
                module.marks = (*getattr(module, "marks", ()), name)
                return {path: module}

        return Mark

    structure("first")
    structure("second")

    plugin("flag")(Flag)


def test_structure_steps_run_in_the_order_of_the_mapping(marks):
    for order in (["first", "second"], ["second", "first"]):
        model = nn.Sequential(nn.Linear(1, 1))
        Pipeline.from_config({name: {} for name in order}).apply(model)
        assert list(model[0].marks) == order


def test_a_plan_of_structure_steps_works_on_a_copy_of_the_tree(marks):
    model = nn.Sequential(nn.Linear(1, 1))
    pipeline = Pipeline.from_config({"flag": {}, "first": {}, "half": {}})
    plan = pipeline.plan(model)
    assert [(a.step, a.phase, a.modules) for a in plan.actions] == [
        ("first", "structure", ("0",)),
        ("flag", "runtime", ("",)),
    ]
    assert not hasattr(model[0], "marks")
    pipeline.apply(model)
    assert (model[0].marks, model.flag) == (("first",), True)
    assert not pipeline.plan(model)


def test_a_failure_in_a_later_step_leaves_the_model_as_it_was(marks, plugin):
    @plugin("fails")
    class Fails(ModelStep):
        """Raises when it acts."""

        def targets(self, model):
            return ("",)

        def act(self, model):
            model.half_done = True
            raise RuntimeError("no")

    model = nn.Sequential(nn.Linear(1, 1), nn.Conv2d(2, 2, 3))
    before = facts(model)
    with pytest.raises(RuntimeError, match="no"):
        Pipeline.from_config(
            {"first": {}, "half": {}, "conv2d_memory_format": {}, "fails": {}}
        ).apply(model)
    assert facts(model) == before
    assert not hasattr(model[0], "marks")
    assert not hasattr(model, "half_done")


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
    ("want", "said"),
    [
        (Want(memory_format="channels_last"), "2 dimensions"),
        (Want(memory_format="diagonal"), "'diagonal'"),
        (Want(dtype="float17"), "'float17'"),
        ("float16", "return a Want or None"),
    ],
)
def test_a_step_that_wants_the_impossible_is_at_fault(plugin, want, said):
    @plugin("odd")
    class Odd(TensorStep):
        """Wants the parametrized value."""

        def want(self, tensor):
            return want

    with pytest.raises(StepError, match=f"^steps.odd: .*{said}"):
        Pipeline.from_config({"odd": {}}).plan(nn.Linear(2, 2))


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
