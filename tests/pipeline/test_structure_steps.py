"""Steps that replace modules: order, plans on a copy, failures."""

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline
from prepare.step import ModelStep, ModuleStep
from small_nets import facts


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

    @plugin("flag")
    class Flag(ModelStep):
        """Sets a flag."""

        def targets(self, model):
            return () if getattr(model, "flag", False) else ("",)

        def act(self, model):
            model.flag = True


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


def test_a_replacement_module_is_prepared_too(plugin):
    @plugin("swap")
    class Swap(ModuleStep):
        """Puts a linear layer in the place of every identity."""

        def targets(self, model):
            return [n for n, m in model.named_modules() if isinstance(m, nn.Identity)]

        def rewrite(self, model, name):
            return {name: nn.Linear(2, 2)}

    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity()))
    Pipeline.from_config({"swap": {}, "half": {}}).apply(model)
    assert model[0].weight.dtype is model[1][0].weight.dtype is torch.float16


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
