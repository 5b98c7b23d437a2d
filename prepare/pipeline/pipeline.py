"""Declare how a model is to be, see what that would change, and make it so: the import for training code."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from prepare import recipe
from prepare.core.model.module_tree import Snapshot, copy_tree
from prepare.core.utils.gc_pause import paused_collector
from prepare.core.utils.options import no_options, plain
from prepare.core.utils.signals import held_interrupts
from prepare.errors import (
    ConfigError,
    KnownIssueError,
    KnownIssueWarning,
    PrepareError,
    Problem,
    RefusedError,
    StepError,
)
from prepare.pipeline.build_plan import tensor_plans
from prepare.pipeline.collect_wants import make_table, targets
from prepare.pipeline.drift import Drift, Guard, bring_into_line, drifted, drifted_state, raise_on
from prepare.pipeline.known_issue_checks import KnownIssues, Met, check_choice, consult
from prepare.pipeline.optimizer_state import (
    KeepInLine,
    bring_state_into_line,
    gone,
    innermost,
    state_moves,
    strangers,
    unfit,
)
from prepare.pipeline.preconditions import flattened, lazy, refusals
from prepare.pipeline.tensor_table import Table
from prepare.pipeline.transfer import FlatMove, Move, Transfer
from prepare.plan import Action, Plan
from prepare.registry import STEPS
from prepare.step import PHASES, InputStep, ModelStep, ModuleStep, Step, TensorStep

_Model = TypeVar("_Model", bound=nn.Module)


class Pipeline:
    """An ordered mapping of steps, ready to plan, apply and format.

    >>> pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}})
    >>> model = pipeline.apply(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    >>> model[0].weight.dtype
    torch.bfloat16
    >>> bool(pipeline.plan(model))
    False
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps: dict[str, Step] = {step.name: step.settle() for step in steps}
        bound = [step.bind(self.steps.values()) for step in self.steps.values()]
        self._phases = {phase: [step for step in bound if step.phase == phase] for phase in PHASES}
        self._acting = (*self._phases["runtime"], *self._phases["inputs"])

    @classmethod
    def from_config(cls, steps: Mapping[str, Mapping[str, Any] | None]) -> Pipeline:
        """The pipeline that `{name: options}` declares; `{name: null}` drops that step.

        Any mapping will do, one of OmegaConf's too; nothing of it is kept.

        Raises:
            ConfigError: with one problem for every mistake in it.
        """
        if not isinstance(steps, Mapping):
            raise ConfigError(
                "steps", f"{type(steps).__name__} is no mapping", "give {name: options}"
            )
        built, problems = [], []
        for name in steps:
            try:
                if (options := _options(name, steps)) is not None:
                    built.append(STEPS[name].from_options(options))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError.of(problems)
        return cls(built)

    def to_config(self) -> dict[str, dict[str, Any]]:
        """`{name: options}` with every option spelt out, as plain data."""
        return {name: step.to_options() for name, step in self.steps.items()}

    @classmethod
    def load(cls, path: str | Path, device: str | None = None) -> Pipeline:
        """The pipeline of a recipe; `device` takes the place of the one that the recipe names.

        Raises:
            RecipeError: the file is no recipe.
            ConfigError: it names steps or options that do not exist.
        """
        steps = recipe.load(path)
        if device is not None:
            steps["device"] = {**(steps.get("device") or {}), "device": device}
        return cls.from_config(steps)

    def save(self, path: str | Path) -> None:
        """Writes the recipe: plain YAML, fully resolved, whole or not at all."""
        recipe.save(path, self.to_config())

    def plan(self, model: nn.Module, *, known_issues: KnownIssues = "error") -> Plan:
        """What `apply` would do to `model`; touches nothing, and works on the meta device too.

        Where this torch is known to give wrong numbers for a model in training mode, that is among
        the plan's errors, or with `known_issues="warn"` among its warnings; "ignore" asks for neither.

        Raises:
            ConflictError: two tensor steps want different things of one tensor.
        """
        check_choice(known_issues)
        with paused_collector():
            return self._plan(model, known_issues)

    def apply(
        self,
        model: _Model,
        strict: bool = True,  # noqa: FBT001, FBT002
        *,
        optimizer: Optimizer | None = None,
        low_memory: bool = False,
        known_issues: KnownIssues = "error",
    ) -> _Model:
        """Prepares `model` in place and gives it back: the same object, the same Parameters.

        With `strict`, a request that has no effect and a pattern that matches nothing are errors;
        else they are left in `plan(model).errors`. The state of `optimizer` is moved along, and is
        kept in line when a checkpoint is loaded into it later. On any failure all is as it was;
        with `low_memory`, which gives each old tensor up at once, the error says what has changed.

        Where this torch is known to give wrong numbers for the model, that is an error in training
        mode and a KnownIssueWarning in eval mode, or with `known_issues="warn"`; "ignore" does not ask.
        What is known to be slow is in `plan(model).warnings`.

        Raises:
            ConfigError: the request comes to nothing, or contradicts itself.
            KnownIssueError: it would give wrong numbers in training.
            RefusedError: this model cannot be prepared as it is now.
            StepError: a step raised, or did not bring about what it wants.
            PartialError: a failure midway, with `low_memory`.
        """
        check_choice(known_issues)
        _check_strict(strict)
        optimizer = optimizer if optimizer is None else innermost(optimizer)
        actions, table, met, rewritten = self._survey(model, known_issues)
        _raise(RefusedError, lazy(table))
        if errors := [*(table.errors if strict else ()), *_known_errors(met)]:
            _raise(RefusedError, flattened(model))
            raise _as_one(errors)
        for one in met:
            if one.issue.effect == "wrong":
                warnings.warn(str(one.problem()), KnownIssueWarning, stacklevel=2)
        moves = _moves(table, optimizer)
        if actions or moves:
            problems = [p for step in self.steps.values() for p in step.obstacles(model)]
            if optimizer is not None:
                problems += [*strangers(model, optimizer), *gone(model, rewritten, optimizer)]
            _raise(RefusedError, [*problems, *refusals(model, table)])
            self._act(model, actions, table, moves, optimizer=optimizer, low_memory=low_memory)
        if optimizer is not None:
            KeepInLine().install(optimizer)
        return model

    def check(
        self, model: nn.Module, *, strict: bool = False, optimizer: Optimizer | None = None
    ) -> list[Drift]:
        """What of a prepared `model` is no longer as this pipeline wants it; empty where all is.

        A checkpoint loaded with `assign=True`, swapped weights or a module that was cast again. With
        `optimizer`, also its state that is out of line with its parameters, as after loading a
        checkpoint of another layout, and whether it holds parameters of this model at all.

        Raises:
            DriftError: with `strict`, if anything has drifted.
        """
        found = drifted(self.plan(model, known_issues="ignore"))
        if optimizer is not None:
            found += drifted_state(model, innermost(optimizer))
        if strict:
            raise_on(found)
        return found

    def guard(self, model: nn.Module, *, every: int = 100) -> Guard:
        """A watch over a prepared `model` for the training loop: call it after each step.

        Every so many calls it looks at all modules and tensors, in less than a millisecond for 500
        of them, and raises DriftError where one is no longer as this pipeline wants it.

        Raises:
            DriftError: something has drifted already.
        """
        self.check(model, strict=True)
        return Guard(model, every=every)

    def format(self, batch: Any) -> Any:
        """The batch as the prepared model wants it; without an input step, the same object."""
        for step in self._phases["inputs"]:
            batch = step.format(batch)
        return batch

    def __repr__(self) -> str:
        return f"Pipeline.from_config({self.to_config()!r})"

    def _plan(self, model: nn.Module, known_issues: KnownIssues) -> Plan:
        actions, table, met, model = self._survey(model, known_issues)
        errors = [*table.errors, *_known_errors(met)]
        remarks = [remark for step in self.steps.values() for remark in step.remarks(model)]
        warned = [*_warnings(met), *remarks]
        return Plan(self.to_config(), tensor_plans(table), actions, errors, warned)

    def _survey(self, model: nn.Module, known_issues: KnownIssues = "ignore") -> _Survey:
        actions, dead = [], []
        if self._phases["structure"]:
            model = copy_tree(model)
            actions, dead = _rewrite(model, self._phases["structure"])
        for step in self._acting:
            if names := tuple(step.targets(model)):
                actions.append(Action(step.name, step.phase, names))
        table = make_table(model, self._phases["tensors"])
        table.errors.extend(dead)
        return _Survey(actions, table, consult(model, table, known_issues), model)

    def _act(
        self,
        model: nn.Module,
        actions: list[Action],
        table: Table,
        moves: list[Move | FlatMove],
        *,
        optimizer: Optimizer | None,
        low_memory: bool,
    ) -> None:
        undo = _Undo(Snapshot(model) if actions else None)
        done = False
        try:
            try:
                if any(action.phase == "structure" for action in actions):
                    _rewrite(model, self._phases["structure"])
                    moves = _moves(make_table(model, self._phases["tensors"]), optimizer)
                undo.transfer = Transfer(moves, low_memory=low_memory)
                undo.transfer.run()
                for step in self._acting:
                    if list(step.targets(model)):
                        step.act(model)
                _nothing_left(self._survey(model))
                # Casts that autocast has cached are of the old weights.
                torch.clear_autocast_cache()
                done = True
            finally:
                if not done:
                    undo.run()
        except KeyboardInterrupt:
            # One that arrived between the failure and the undoing of it.
            if not done:
                undo.run()
            raise


def like(model: _Model, reference: nn.Module) -> _Model:
    """Brings `model`, a copy of `reference` made before that was prepared, into line with it, in place.

    An EMA or teacher copy, or torch's AveragedModel: every tensor gets the device, dtype and strides of
    its counterpart by name, and every module its repairs; values stay. On any failure all is as it was.

    Raises:
        RefusedError: the two have not the same tensors, or `model` cannot be prepared as it is now.
    """
    bring_into_line(model, reference)
    return model


def relayout(optimizer: Optimizer) -> Optimizer:
    """Brings the state of `optimizer` into line with its parameters, in place: device, dtype and strides.

    For an optimizer that `apply` was not given, after a checkpoint of another layout was loaded into
    it: torch keeps the strides of the file, and its fused optimizers then meet the wrong elements.
    Values stay. On any failure all is as it was.
    """
    bring_state_into_line(innermost(optimizer))
    return optimizer


class _Survey(NamedTuple):
    """What is to be done by the steps that act on modules, and to which tensors; what is known of it."""

    actions: list[Action]
    table: Table
    met: list[Met]
    model: nn.Module  # after the structure steps: a copy of the module tree where there are any


@dataclass
class _Undo:
    """The way back for tensors and for the module tree; may be run again."""

    snapshot: Snapshot | None
    transfer: Transfer | None = None

    def run(self) -> None:
        with held_interrupts():
            if self.transfer:
                self.transfer.undo()
            if self.snapshot:
                self.snapshot.restore()


def _moves(table: Table, optimizer: Optimizer | None) -> list[Move | FlatMove]:
    """What is to be done to the tensors of the model, and of the optimizer's state along with them."""
    moves = table.moves()
    if optimizer is None:
        return moves
    by_tensor = {id(tensor): move for move in moves for tensor in move.tensors}
    if moves:
        _raise(RefusedError, unfit(optimizer, by_tensor))
    return [*moves, *state_moves(optimizer, by_tensor)]


def _check_strict(strict: object) -> None:
    """An optimizer given without its name would be taken for it, and its state left behind."""
    if not isinstance(strict, bool):
        remedy = "give True or False; an optimizer goes to optimizer=..., a batch to format(batch)"
        raise ConfigError("strict", f"a {type(strict).__name__} is not allowed", remedy)


def _raise(kind: type[PrepareError], problems: Iterable[Problem]) -> None:
    if problems := list(problems):
        raise kind.of(problems)


def _options(name: str, steps: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        options = plain(steps[name])
    except (
        Exception
    ) as error:  # a foreign mapping (OmegaConf's) resolves here, and says what is wrong
        raise ConfigError(f"steps.{name}", str(error).splitlines()[0]) from error
    if options is not None and not isinstance(options, dict):
        raise ConfigError.of([no_options(name, options)])
    return options


def _rewrite(model: nn.Module, steps: list[ModuleStep]) -> tuple[list[Action], list[ConfigError]]:
    """Runs the structure steps on `model`, in their order; what each did, and patterns without a match."""
    actions, dead = [], []
    for step in steps:
        names, errors = targets(model, step)
        dead += errors
        touched = dict.fromkeys(names)
        for path, module in step.rewrites(model, names):
            if not path and module is not model:
                raise StepError(f"steps.{step.name}", "the model itself cannot be replaced")
            if path:
                model.set_submodule(path, module)
            touched[path] = None
        if names:
            actions.append(Action(step.name, step.phase, tuple(touched)))
    return actions, dead


def _nothing_left(found: _Survey) -> None:
    """The postcondition: after `apply`, nothing is to be done any more."""
    for action in found.actions:
        names = ", ".join(action.modules[:3]) or "the model"
        raise StepError(f"steps.{action.step}", f"still has to do with {names} after it has run")
    for wanted in found.table.tensors:
        if wanted.move():
            wrong = f"{wanted.places[0].path} did not take {dict(wanted.wants)}"
            raise StepError(f"steps.{', '.join(wanted.steps)}", wrong)


def _known_errors(met: list[Met]) -> list[ConfigError]:
    problems = [one.problem() for one in met if one.is_error]
    return [KnownIssueError.of(problems)] if problems else []


def _warnings(met: list[Met]) -> list[Problem]:
    return [one.problem() for one in met if not one.is_error]


def _as_one(errors: list[ConfigError]) -> PrepareError:
    if len(errors) == 1:
        return errors[0]
    problems: list[Problem] = [problem for error in errors for problem in error.problems]
    return ConfigError.of(problems)


__all__ = [
    "InputStep",
    "ModelStep",
    "ModuleStep",
    "Pipeline",
    "Plan",
    "Step",
    "TensorStep",
    "like",
    "relayout",
]
