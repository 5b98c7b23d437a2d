"""Declare how a model is prepared, plan the changes, and apply them: the import for training code."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from prepare import recipe
from prepare.core.forward.call import Call, call_of
from prepare.core.forward.torch_state import Amp, device_of
from prepare.core.forward.unchanged import copy_of
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.model.module_tree import clone_of, copy_tree
from prepare.core.utils.options import no_options, plain
from prepare.core.utils.process_state import held_interrupts, paused_collector
from prepare.core.utils.suggest import choose, meant
from prepare.core.utils.text import first_line, plural
from prepare.errors import (
    ConfigError,
    KnownIssueWarning,
    Problem,
    RecipeError,
    RecipeWarning,
    RefusedError,
    combined,
    raise_problems,
)
from prepare.pipeline.apply import (
    apply_steps,
    by_phase,
    check_module,
    lazy_problems,
    module_problems,
    survey,
)
from prepare.pipeline.distributed import on_rank_zero
from prepare.pipeline.known_issue_checks import KnownIssues, known_errors, warned_of
from prepare.pipeline.optimizer_state import (
    optimizer_drift,
    optimizers_in,
    relayout_when_loaded,
    warn_of_left_behind,
    warn_of_untrained,
)
from prepare.pipeline.plan import Drift, Plan, plan_drift, raise_drift
from prepare.pipeline.tensor_table import tensor_plans
from prepare.registry import STEPS
from prepare.step import PHASES, ModuleStep, Step, remembering
from prepare.steps.device import Device
from prepare.steps.input_format import InputFormat

if TYPE_CHECKING:
    from prepare.core.forward.example_input import Example

_Model = TypeVar("_Model", bound=nn.Module)
_Example = TypeVar("_Example", bound="Example | Call")
_Asking = ModuleStep | InputFormat
_Steps = Mapping[str, Mapping[str, Any] | None]
_log = logging.getLogger(__name__)
_2D = {"conv2d_memory_format": "channels_last"}
_3D = {"conv3d_memory_format": "channels_last_3d"}
# The steps and their memory formats for each word.
_FORMATS = {
    "channels_last": _2D,
    "channels_last_3d": _3D,
    "by_rank": _2D | _3D,
    "contiguous": dict.fromkeys(_2D | _3D, "contiguous"),
}
_DTYPES = {name: name for name in ("float16", "bfloat16", "float32", "float64")}


# What `prepare` was to change in each model, for `report`; an entry goes with its model.
PLANS: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()


class Pipeline:
    """An ordered mapping of steps, ready to plan, apply and format.

    Examples:
        >>> pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}})
        >>> model = pipeline.apply(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
        >>> model[0].weight.dtype
        torch.bfloat16
        >>> bool(pipeline.plan(model))
        False
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        if isinstance(steps, Mapping):
            remedy = "write Pipeline.from_config({name: options})"
            raise ConfigError("steps", "a mapping of names to options, not steps", remedy)
        self.steps: dict[str, Step] = {step.name: _settled(step) for step in steps}
        self._bind()

    def _bind(self) -> None:
        steps = self.steps.values()
        self._phases = by_phase(step.bind(steps) for step in steps)

    @classmethod
    def from_config(cls, steps: _Steps) -> Pipeline:
        """Return the pipeline that `{name: options}` declares; `{name: null}` drops that step.

        `steps` may be any mapping, also one of OmegaConf's; its content is copied.

        Raises:
            ConfigError: with one problem for every mistake in `steps`.
        """
        return cls(_built(steps))

    @classmethod
    def from_recipe(cls, steps: _Steps, given: _Steps | None = None) -> Pipeline:
        """Return the pipeline of `steps` that somebody else may have written.

        Nothing in `steps` can run a program, read or write a path, or use the network: an option that is not
        known to be harmless is refused. The steps in `given`, which are yours, are added, replace a step of
        the same name, or drop it.

        Raises:
            ConfigError: with one problem for every mistake, and every option that a recipe may not set.
        """
        _check_mapping(steps)
        given = given or {}
        return cls(_built({**steps, **given}, of_recipe=steps.keys() - given.keys()))

    def to_config(self) -> dict[str, dict[str, Any]]:
        """Return `{name: options}` with every option spelled out, as plain data."""
        return {name: step.to_options() for name, step in self.steps.items()}

    def to_recipe(self) -> dict[str, dict[str, Any]]:
        """Return `to_config()` without what a recipe may not set, and `left_out` lists."""
        steps = self.steps.items()
        return {name: recipe.options_of(step) for name, step in steps if recipe.can_hold(step)}

    def left_out(self) -> list[Problem]:
        """Return a problem for each option, and each step that needs one, which a recipe cannot hold."""
        return [problem for step in self.steps.values() for problem in recipe.left_out(step)]

    def warn_of_left_out(self) -> None:
        """Warn of each option in `left_out`, with a RecipeWarning."""
        for problem in self.left_out():
            warnings.warn(str(problem), RecipeWarning, stacklevel=3)

    @classmethod
    def load(
        cls, path: str | Path, device: str | None = None, *, steps: _Steps | None = None
    ) -> Pipeline:
        """Read the pipeline from a recipe file; `device` replaces the device of the recipe.

        `steps` are added to those of the recipe, replace a step of the same name, or drop it: `{name: null}`.

        Raises:
            RecipeError: the file is not a recipe.
            ConfigError: the recipe names steps or options that do not exist, or sets one that is not known to
                be harmless; see `from_recipe`.
        """
        given = dict(steps or {})
        if device is not None:
            given["device"] = {"device": device}
        return cls.from_recipe(recipe.load(path), given)

    def save(self, path: str | Path) -> None:
        """Write the recipe as plain YAML, fully resolved; the file is replaced atomically.

        What a recipe may not set is left out, with a RecipeWarning for each option.

        Raises:
            RecipeError: a pattern is a regular expression, without which it would mean something else.
        """
        for problem in self.left_out():
            if problem.where.endswith((".include", ".exclude", ".keep")):
                wrong = "holds a regular expression, which is for Python only"
                raise RecipeError(problem.where, wrong, "give globs, as in encoder.*")
        self.warn_of_left_out()
        recipe.save(path, self.to_recipe())

    def plan(
        self,
        model: nn.Module,
        *,
        known_issues: KnownIssues = "error",
        amp: Amp = "none",
        batch: int | None = None,
    ) -> Plan:
        """Return what `apply` would do to `model`; changes nothing, and works on the meta device.

        What `apply` would raise for a known issue of torch is in the plan's `errors`, and what it would warn
        of in its `warnings`, of a model in evaluation mode without what only a backward meets, which is in
        `training_errors`; `known_issues` and `amp` are as there. `batch` is the number of samples of a
        call: what is wrong at batch 1 only is a warning for more, and an error if it is not known.

        Raises:
            ConflictError: two tensor steps want different things of one tensor.
        """
        with held_interrupts(), paused_collector(), remembering():
            work = survey(model, self._phases, known_issues, amp, batch)
            steps = self.steps.values()
            notes = [each for step in steps for each in step.bind(steps).remarks(work.model)]
            warned = [*warned_of(work.issues, repairs=REPAIR_STEP in self.steps), *notes]
            errors = [*work.table.errors, *known_errors(work.issues)]
            unfit = [problem for step in steps for problem in step.in_training()]
            unfit += [match.problem() for match in work.issues if match.is_wrong]
            tensors = tensor_plans(work.table)
            return Plan(self.to_config(), tensors, work.actions, errors, warned, unfit)

    def apply(
        self,
        model: _Model,
        *,
        strict: bool = True,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        low_memory: bool = False,
        known_issues: KnownIssues = "error",
        amp: Amp = "none",
        example: Any = None,
    ) -> _Model:
        """Prepare `model` in place and return it: the same object with the same Parameters.

        With `strict`, a request that has no effect and a pattern that matches nothing are errors;
        without it, they are listed in `plan(model).errors`. The state of `optimizer`, one or several, is
        moved along with the parameters, and is restrided when a checkpoint is loaded into it later.
        Parameters that none of them trains are named in an UntrainedWarning. A failure
        leaves everything as it was; with `low_memory`, which frees each old tensor at once, the error
        names what has changed. Ctrl-C acts between the steps and between the parts of the copy, or after
        the model is prepared whole; the third one acts at once.

        If this torch is known to compute wrong numbers for the model, that is an error in training mode,
        and a KnownIssueWarning in eval mode or with `known_issues="warn"`; "ignore" looks nothing up. `amp`
        is the dtype of the autocast in which it will run: torch is known to be wrong in some dtypes only.
        Known slow cases are listed in `plan(model).warnings`. What may end the process in training is an
        error with "warn" too.

        With `example`, a batch before `format`, the steps whose options depend on one choose
        them first, as on the command line: `keep_layout` the calls that its layout flow names. The options
        chosen are those of this pipeline from then on. The other steps are tried on a copy of the model.

        Raises:
            ConfigError: the request has no effect, or contradicts itself.
            KnownIssueError: the prepared model would compute wrong numbers in training.
            RefusedError: the model cannot be prepared in its present state.
            StepError: a step raised, or did not do what it wants.
            PartialError: a failure midway, with `low_memory`.
        """
        batch = None
        if example is not None:
            self.choose(model, example, amp)
            batch = call_of(example).batch
        start = time.perf_counter()
        with held_interrupts(), paused_collector(), remembering():
            optimizers = optimizers_in(optimizer)
            work = survey(model, self._phases, known_issues, amp, batch)
            raise_problems(RefusedError, lazy_problems(work.table))
            if errors := [*(work.table.errors if strict else ()), *known_errors(work.issues)]:
                raise_problems(RefusedError, module_problems(model))
                raise combined(errors)
            for match in work.issues:
                if match.is_wrong:
                    warnings.warn(str(match.problem()), KnownIssueWarning, stacklevel=2)
            warn_of_untrained(model, optimizers)
            moved = apply_steps(model, self._phases, work, optimizers, low_memory=low_memory)
            for each in optimizers:
                relayout_when_loaded(each)
            if moved and model.training and known_issues != "ignore":
                warn_of_left_behind(model, optimizers)
        done = "nothing to do" if moved is None else f"moved {plural(moved, 'tensor')}"
        names, took = ", ".join(self.steps) or "no step", time.perf_counter() - start
        _log.info("%s: %s: %s, %.3f s", type(model).__name__, names, done, took)
        return model

    def choose(self, model: nn.Module, example: Any, amp: Amp = "none") -> None:
        """Let the steps that ask for an example choose their options, as `apply(model, example=)` does.

        `example` is a batch before `format`; the model stays as it is.
        """
        check_module(model)
        for step in self.asking():
            copied = copy_tree(model, cache(clone_of))  # a shared tensor stays one
            with remembering():
                chosen, notes = self.step_for(step, copied, call_of(example), amp)
            for note in notes:
                _log.warning("%s", note)
            if is_chosen(self.steps, chosen):
                self.steps[step.name] = chosen
                self._bind()

    def asking(self) -> list[_Asking]:
        """Return the steps that choose options by an example, and have none yet."""
        more = [] if self._phases["inputs"] else [InputFormat()]  # which is what `format` does
        steps = [*self.steps.values(), *more]
        return [s for s in steps if isinstance(s, _Asking) and s.bind(steps).without_example()]

    def step_for(
        self, step: _Asking, copied: nn.Module, example: Any, amp: Amp
    ) -> tuple[Step, list[str]]:
        """Return a step of this pipeline with the options that it finds with `example`, and notes on them.

        `copied` is a copy of the model; the other steps are applied to it.
        """
        steps = self.steps.values()
        others = Pipeline(each for each in steps if each is not step and each.phase != "runtime")
        backward = copied.training
        others.apply(copied, strict=False, known_issues="ignore")
        bound, given = step.bind(steps), others.formatted(call_of(example).map(copy_of), copied)
        # A wrapped model runs collectives, which rank 0 would wait in for ever.
        raise_problems(RefusedError, module_problems(copied))
        ask = partial(bound.for_example, copied, given, backward=backward, amp=amp)
        chosen, notes = on_rank_zero(ask)
        # What follows other steps goes on following them.
        same = {f.name for f in fields(step) if getattr(chosen, f.name) == getattr(bound, f.name)}
        return replace(chosen, **{name: getattr(step, name) for name in same}), notes

    def undo(self, model: nn.Module, *, phases: Iterable[str] = PHASES) -> None:
        """Take the steps of these phases back, in place, the last first, as far as steps can be undone."""
        for step in reversed(self.steps.values()):
            if step.phase in phases:
                step.undo(model)

    def check(
        self,
        model: nn.Module,
        *,
        strict: bool = False,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
    ) -> list[Drift]:
        """Return what in a prepared `model` has drifted from this pipeline; an empty list if nothing has.

        Tensors drift when a checkpoint is loaded with `assign=True`, when weights are swapped, or when a
        module is cast again. With `optimizer`, one or several, also check that their state of parameters of
        this model has their device, dtype and strides; parameters that none of them trains are named in an
        UntrainedWarning.

        Raises:
            DriftError: with `strict`, if anything has drifted.
        """
        optimizers = optimizers_in(optimizer)
        drifts = [*plan_drift(self.plan(model, known_issues="ignore"))]
        drifts += optimizer_drift(model, optimizers)
        warn_of_untrained(model, optimizers)
        if strict:
            raise_drift(drifts)
        return drifts

    def format(self, batch: Any) -> Any:
        """Return the batch as the prepared model expects it; the same object if nothing changes.

        Without an input step that is the device and the floating-point dtype that the steps give to the
        weights, without which the model raises; the step `input_format` gives the memory format too.
        """
        for step in self._phases["inputs"] or self._needed_format():
            batch = step.format(batch)
        return batch

    def _needed_format(self) -> list[InputFormat]:
        needed = replace(InputFormat().bind(self.steps.values()), memory_format=None)
        return [needed] if needed.device or needed.dtype else []

    def formatted(self, example: _Example, model: nn.Module) -> _Example:
        """Return an example, or a call, of `model` as `input_format` formats it."""
        args, kwargs = self.input_format().format_call(model, example.args, example.kwargs)
        return replace(example, args=args, kwargs=kwargs)

    def format_call(self, call: Call, model: nn.Module) -> Call:
        """Return a call of `model` as `format` formats its batch."""
        args, kwargs = call.args, call.kwargs
        for step in self._phases["inputs"] or self._needed_format():
            if isinstance(step, InputFormat):
                args, kwargs = step.format_call(model, args, kwargs)
            else:  # a step written by a user expects the batch itself, not a tuple of arguments
                args = (step.format(args[0]),) if len(args) == 1 else step.format(args)
                kwargs = step.format(kwargs)
        return Call(args, kwargs)

    def input_format(self) -> InputFormat:
        """Return the step that formats batches of tensors, also if the pipeline declares none."""
        declared = (step for step in self._phases["inputs"] if isinstance(step, InputFormat))
        return next(declared, None) or InputFormat().bind(self.steps.values())

    def __repr__(self) -> str:
        return f"Pipeline.from_config({self.to_config()!r})"


def _settled(step: Step) -> Step:
    return step.settle() if isinstance(step, Device) else step


def _built(steps: Mapping[str, Any], of_recipe: Collection[str] = ()) -> list[Step]:
    """Return the steps; those named in `of_recipe` may set only what is known to be harmless."""
    _check_mapping(steps)
    built: list[Step] = []
    problems: list[Problem] = []
    for name in steps:
        try:
            if (options := _options(name, steps)) is not None:
                built.append(step := STEPS[name].from_options(options))
                if name in of_recipe:
                    problems += recipe.refused(step)
        except ConfigError as error:
            problems += error.problems
    raise_problems(ConfigError, problems)
    return built


def _check_mapping(steps: object) -> None:
    if not isinstance(steps, Mapping):
        wrong = f"{type(steps).__name__} is not a mapping"
        raise ConfigError("steps", wrong, "give {name: options}")


def _options(name: str, steps: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        options = plain(steps[name])
    except Exception as error:  # OmegaConf resolves interpolations here, and names what is wrong
        raise ConfigError(f"steps.{name}", first_line(error)) from error
    if options is not None and not isinstance(options, dict):
        raise ConfigError.of([no_options(name, options)])
    return options


def is_chosen(steps: Collection[str], chosen: Step) -> bool:
    """Return whether a step with the options that it has found belongs into `steps`: one adds itself."""
    return chosen.name in steps or bool(getattr(chosen, "exclude", ()))


def prepare(
    model: _Model,
    given: torch.memory_format | str | Any = None,
    *,
    memory_format: torch.memory_format | str | None = None,
    example: Any = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    repair_layout: bool | None = None,
    format_inputs: bool = True,
    known_issues: KnownIssues = "error",
) -> _Model:
    """Prepare `model` in place and return it: the pipeline of these options, built and applied.

    Args:
        model: in training or evaluation mode; the same object with the same Parameters is returned.
        given: the `example`, or a `memory_format`.
        memory_format: of the weights of convolutions: `channels_last` (2-d), `channels_last_3d`, `by_rank`
            (both) or `contiguous`; also torch's objects.
        example: a batch, as before `format`. `rewrite_conv` times the convolutions with it, and runs those
            as other operations that are faster so; `fuse_inference` times the model in evaluation mode.
        dtype: of the weights, whatever they were: `float16` or `bfloat16`, beside which batch and instance
            norms are in float32, `float32` or `float64`.
        device: `cpu`, `cuda`, `mps` or `auto`; also torch's object.
        optimizer: one or several; their state is moved along with the parameters.
        repair_layout: replace kernels that lose the layout, or compute wrong gradients in it; by default
            if a channels-last format is asked for.
        format_inputs: install a hook that formats the inputs of the model.
        known_issues: as in `Pipeline.apply`.

    `Pipeline.from_config` has more options, and `Pipeline.save` writes a recipe.

    Raises:
        ConfigError: an option is wrong, or has no effect on this model.
        RefusedError: the model cannot be prepared in its present state.
    """
    steps: dict[str, Any] = {}
    is_batch = bool(call_of(given).tensors())
    if given is not None and (example if is_batch else memory_format) is not None:
        raise ConfigError("example" if is_batch else "memory_format", "is given twice", "give one")
    example = given if is_batch else example
    memory_format = memory_format if is_batch or given is None else given
    if device is not None:
        steps["device"] = {"device": plain(device)}
    if dtype is not None:
        steps["half"] = {"dtype": _chosen("dtype", dtype, _DTYPES)}
    if memory_format is not None:
        formats = _chosen("memory_format", memory_format, _FORMATS)
        steps |= {step: {"memory_format": name} for step, name in formats.items()}
        if repair_layout is None:
            repair_layout = formats != _FORMATS["contiguous"]
    if repair_layout:
        steps[REPAIR_STEP] = {}
    if steps and format_inputs:
        steps["input_format"] = {"attach": True}
    if example is not None:
        steps["rewrite_conv"] = {}
        infers = not model.training and repair_layout and format_inputs
        on_cpu = device in (None, "cpu") and device_of([model]).type == "cpu"
        steps |= {"fuse_inference": {}} if infers and on_cpu else {}
    if not steps:
        allowed = "give memory_format, dtype, device or example"
        raise ConfigError("prepare", "nothing is asked for", allowed)
    pipeline = Pipeline.from_config(steps)
    if example is not None:
        pipeline.choose(model, example)
        if pipeline.asking():
            example = None  # it cannot be called, as a warning has said
    plan = pipeline.plan(model, known_issues="ignore")
    pipeline.apply(model, optimizer=optimizer, known_issues=known_issues, example=example)
    PLANS[model] = plan
    methods = [name for name in ("encode", "decode") if hasattr(type(model), name)]
    if dtype is not None and format_inputs and methods:
        wrong = f"the hook that casts inputs sits on forward: {' and '.join(methods)} get theirs as they are"
        remedy = "give them tensors of the dtype, or take method= of prepare.frameworks.diffusers.prepare"
        warnings.warn(str(Problem(type(model).__name__, wrong, remedy)), stacklevel=2)
    return model


def _chosen(key: str, value: Any, allowed: Mapping[str, Any]) -> Any:
    name = meant(value, allowed)
    if name is None:
        word = str(plain(value))
        raise ConfigError(key, f"{word!r} is not allowed", choose(word, allowed))
    return allowed[name]
