"""The properties that every step must have, each as a test."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from prepare.core.model.tensors import inner_data, name_of, named_tensors
from prepare.errors import RecipeWarning, StepError
from prepare.pipeline import Pipeline
from prepare.pipeline.plan import state
from prepare.registry import STEPS
from prepare.step import InputStep, Step, TensorStep
from prepare.testing.networks import facts, mixed, tensors


class StepContract:
    """The tests of a step for pytest; every built-in step passes them.

    In your own package:

        from prepare.testing import StepContract

        class TestMyStep(StepContract):
            step = "my_step"                 # the name under which it is registered
            options = {"exclude": ["2"]}     # options with which it changes something

    If the step changes nothing in the default network, override `model`; for an input step, override
    `batch`. Add tests of behaviour that is specific to your step, in the same class if you like.
    """

    step: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    keeps_parameters: ClassVar[bool] = True
    """False for a step that creates new Parameters and says so in its docstring (as in fusing modules)."""

    def model(self) -> nn.Module:
        """Return a network to prepare, with the same values each time."""
        torch.manual_seed(0)
        return mixed()

    def batch(self) -> Any:
        """Return a batch to format."""
        image, volume = torch.ones(2, 3, 8, 8), torch.ones(2, 1, 8, 8, 8)
        return {"image": image, "volume": volume, "label": torch.arange(2)}

    def test_it_has_something_to_do_here(self) -> None:
        """The step changes something: otherwise the other tests would prove nothing."""
        idle = not self._pipeline().plan(self.model()) and not self._is(InputStep)
        assert not idle, "give `options` with which it changes something, or override `model`"

    def test_a_plan_touches_nothing_and_is_the_same_twice(self) -> None:
        """A plan changes nothing, and two plans are equal."""
        model = self.model()
        before = facts(model)
        first, second = (self._pipeline().plan(model).to_dict() for _ in range(2))
        for plan in (first, second):  # a warning about this machine is not about the step
            plan["warnings"] = [w for w in plan["warnings"] if w["where"] != "this machine"]
        assert first == second, "two plans of the same model differ"
        _unchanged(model, before, "planning")

    def test_want_is_pure(self) -> None:
        """`want` changes nothing, and has no state."""
        if not self._is(TensorStep):
            pytest.skip("for steps with a `want`")
        model = self.model()
        before = facts(model)
        step = self._pipeline().steps[self.step]
        assert isinstance(step, TensorStep)
        for tensor in named_tensors(model):
            assert step.want(tensor) == step.want(tensor), f"{tensor.path}: two answers"
        _unchanged(model, before, "`want`")

    def test_only_what_the_plan_named_changes(self) -> None:
        """Only tensors and modules in the plan change, and all of these tensors do."""
        self._skip_unless_parameters_stay()
        model = self.model()
        before, plan = facts(model), self._pipeline().plan(model)
        after = facts(self._apply(model))
        named = {_path(tensor) for tensor in plan.tensors if tensor.changes}
        acted = {module for action in plan.actions for module in action.modules}
        changed = {key for key in {*before, *after} if before.get(key, ()) != after.get(key, ())}
        assert named <= changed, f"planned, but not changed: {sorted(named - changed)}"
        inside = tuple(
            f"{name}{mark}" for name in acted for mark in (".", ":") if name or mark == ":"
        )
        stray = sorted(key for key in changed - named if not key.startswith(inside))
        assert not stray, f"changed, but not in the plan: {stray}"

    def test_every_tensor_is_as_planned(self) -> None:
        """Device, dtype and every stride are as planned, also of unchanged tensors."""
        model = self.model()
        plan = self._pipeline().plan(model)
        after = tensors(self._apply(model))
        for planned in plan.tensors:
            tensor = after.get(_path(planned))
            if tensor is None:
                continue
            found = [state(tensor)]
            if inner_data(tensor):  # a step may store values in another form than the tensor says
                found.append(found[0]._replace(dtype=name_of(tensor.dtype)))
            assert planned.new in found, f"{_path(planned)} was planned as {planned.new}"

    def test_afterwards_the_plan_is_empty_and_twice_is_once(self) -> None:
        """A second `apply` changes nothing, and its plan is empty."""
        model = self._apply(self.model())
        once = facts(model)
        assert not self._pipeline().plan(model), "the plan is not empty after `apply`"
        _unchanged(self._apply(model), once, "a second `apply`")

    def test_the_model_its_parameters_and_ties_keep_their_identity(self) -> None:
        """The model and Parameter objects stay the same, with their hooks; tied tensors stay tied."""
        self._skip_unless_parameters_stay()
        model = self.model()
        objects = {path: id(tensor) for path, tensor in tensors(model).items()}
        floats = [p for p in model.parameters() if p.is_floating_point() and p.requires_grad]
        called: list[int] = []
        for index, parameter in enumerate(floats):
            # torch does not annotate register_hook.
            parameter.register_hook(partial(_record, called, index))  # type: ignore[no-untyped-call]
        assert self._apply(model) is model, "`apply` returned another object"
        now = {path: id(tensor) for path, tensor in tensors(model).items()}
        assert now == objects, "a parameter or buffer is another object than before"
        torch.autograd.backward(sum((p.float().sum().cpu() for p in floats), torch.zeros(())))
        assert len(called) == len(floats), "a hook of a parameter is missing"

    def test_a_failure_afterwards_leaves_the_model_as_it_was(self) -> None:
        """After an error in a later stage the model is in its original state."""
        model = self.model()
        before = facts(model)
        failure = StepError(self.step, "fails in the end")
        acts = bool(self._pipeline().plan(model))
        raises = pytest.raises(StepError, match="in the end") if acts else nullcontext()
        with patch("prepare.pipeline.apply._check_nothing_left", side_effect=failure), raises:
            self._apply(model)
        _unchanged(model, before, "a failed `apply`")

    def test_a_prepared_model_can_be_copied_and_pickled(self) -> None:
        """Copies and unpickled models are still prepared."""
        model = self._apply(self.model())
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301
            changed = [_path(t) for t in self._pipeline().plan(copied).tensors if t.changes]
            assert not changed, f"no longer as prepared in a copy: {changed}"

    def test_a_model_without_anything_to_prepare_is_left_alone(self) -> None:
        """With `strict=False` no error is raised."""
        model = nn.Sequential()
        self._pipeline().apply(model, strict=False, known_issues="ignore")
        assert not tensors(model), "the step added tensors to a model without tensors"

    def test_a_plan_works_on_the_meta_device(self) -> None:
        """A plan needs no values: on the meta device it has the same strides."""
        if not self._is(TensorStep):
            pytest.skip("for steps with a `want`")
        with torch.device("meta"):
            model = self.model()
        planned = {_path(t): t.new.stride for t in self._pipeline().plan(model).tensors}
        with_values = self._pipeline().plan(self.model()).tensors
        assert planned == {_path(t): t.new.stride for t in with_values}

    def test_formatting_leaves_the_batch_as_it_was(self) -> None:
        """A formatted batch may share tensors with the original batch, and never writes into them."""
        batch = self.batch()
        before = copy.deepcopy(batch)
        self._pipeline().format(batch)
        assert repr(batch) == repr(before), "`format` changed the batch that was passed to it"

    def test_options_round_trip_and_a_step_is_frozen_plain_and_picklable(self) -> None:
        """Options are plain data that make an equal step; a step is immutable."""
        step = self._step()
        again = STEPS[self.step].from_options(step.to_options())
        assert again == step, f"its options as plain data make another step: {again}"
        assert pickle.loads(pickle.dumps(step)) == step  # noqa: S301
        for field in dataclasses.fields(step):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(step, field.name, None)

    def test_a_recipe_of_it_can_be_saved_and_loaded(self, tmp_path: Path) -> None:
        """A recipe holds every option that it may hold; loading it returns a step with these."""
        pipeline = self._pipeline()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecipeWarning)
            pipeline.save(tmp_path / "recipe.yaml")
        held = Pipeline.from_config(pipeline.to_recipe())
        assert Pipeline.load(tmp_path / "recipe.yaml").steps == held.steps

    def test_the_docstring_is_a_card(self) -> None:
        """The docstring says what the step does, when it helps and hurts, and its source."""
        card = inspect.getdoc(STEPS[self.step]) or ""
        missing = [part for part in ("Helps:", "Hurts:", "Source:") if part not in card]
        assert not missing, f"the docstring of the step has no {', '.join(missing)}"
        assert STEPS[self.step].name == self.step

    def _skip_unless_parameters_stay(self) -> None:
        if not self.keeps_parameters:
            pytest.skip("the step creates new parameters, and says so")

    def _step(self) -> Step:
        return STEPS[self.step].from_options(self.options)

    def _is(self, kind: type[Step]) -> bool:
        return issubclass(STEPS[self.step], kind)

    def _pipeline(self) -> Pipeline:
        return Pipeline.from_config({self.step: self.options})

    def _apply(self, model: nn.Module) -> nn.Module:
        return self._pipeline().apply(model, known_issues="ignore")


def _unchanged(model: nn.Module, before: dict[str, tuple[Any, ...]], by: str) -> None:
    after = facts(model)
    changed = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    assert not changed, f"{by} changed {', '.join(changed)}"


def _path(tensor: Any) -> str:
    return f"{tensor.module}.{tensor.tensor}".lstrip(".")


def _record(called: list[int], index: int, _gradient: Tensor) -> None:
    called.append(index)
