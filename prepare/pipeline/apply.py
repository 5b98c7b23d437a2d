"""Run the steps of a pipeline on a model: survey the work, refuse or do it, check it, undo it on failure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from prepare.core.forward.torch_state import Amp, read_amp, saved_switches
from prepare.core.model.module_tree import Snapshot, copy_tree
from prepare.core.model.tensors import is_lazy, is_wrapper
from prepare.core.utils.process_state import act_on_interrupts, held_interrupts
from prepare.errors import ConfigError, Problem, RefusedError, StepError, raise_problems
from prepare.pipeline.known_issue_checks import (
    IssueMatch,
    KnownIssues,
    check_known_issues,
    find_known_issues,
)
from prepare.pipeline.optimizer_state import (
    mismatched_state,
    removed_parameters,
    unsupported_training,
)
from prepare.pipeline.plan import Action, steps_of
from prepare.pipeline.tensor_table import (
    RequestTable,
    TensorRequest,
    make_table,
    must_separate,
    targets,
)
from prepare.pipeline.transfer import Move, Transfer
from prepare.step import PHASES, ModuleStep, Step

_SHOWN = 3
_SHARDED = ("is sharded by FSDP", "prepare the module first, then shard it")
_WRAP = "prepare the module first, then wrap it"
# By name: importing torch.distributed.fsdp or torch._dynamo for their classes costs a second.
_FORMS = {
    "DistributedDataParallel": ("is wrapped: its buckets have the old strides", _WRAP),
    "DataParallel": ("is wrapped: its replicas keep no hook and no layout", _WRAP),
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
    "OptimizedModule": ("is compiled already", "prepare first, then compile"),
}


# The steps of a pipeline by their phase, in the order in which the phases run.
Phases = dict[str, list[Any]]


def by_phase(steps: Iterable[Step]) -> Phases:
    """Group steps by their phase; the order within a phase stays."""
    steps = list(steps)
    return {phase: [step for step in steps if step.phase == phase] for phase in PHASES}


def _acting(phases: Phases) -> list[Any]:
    """Return the steps that may act on the model after its tensors have been moved."""
    return [step for phase in PHASES[1:] for step in phases[phase]]


class Survey(NamedTuple):
    """The work that a model needs: module actions, tensor requests, and known issues."""

    actions: list[Action]
    table: RequestTable
    issues: list[IssueMatch]
    model: nn.Module  # after the structure steps: a copy of the module tree if there are any


def survey(
    model: nn.Module,
    phases: Phases,
    known_issues: KnownIssues = "ignore",
    amp: Amp = "none",
    batch: int | None = None,
) -> Survey:
    """Ask every step what it has to do; `model` itself is not changed."""
    check_known_issues(known_issues)
    amp = read_amp(amp)
    check_module(model)
    actions: list[Action] = []
    unmatched: list[ConfigError] = []
    if phases["structure"]:
        raise_problems(RefusedError, scripted_problems(model))
        model = copy_tree(model)
        actions, unmatched = _rewrite(model, phases["structure"])
    for step in _acting(phases):
        if names := tuple(step.targets(model)):
            actions.append(Action(step.name, step.phase, names))
    table = make_table(model, phases["tensors"])
    table.errors.extend(unmatched)
    issues = find_known_issues(model, table, known_issues, amp, batch)
    return Survey(actions, table, issues, model)


def _all_moves(table: RequestTable, optimizers: Sequence[Optimizer]) -> list[Move]:
    """Return the moves of the model's tensors, and of the optimizer state that follows them."""
    moves = table.moves()
    by_tensor = {id(tensor): move for move in moves for tensor in move.tensors if optimizers}
    raise_problems(RefusedError, unsupported_training(optimizers, by_tensor))
    return [*moves, *(move for _, move in mismatched_state(optimizers, by_tensor))]


def apply_steps(
    model: nn.Module,
    phases: Phases,
    work: Survey,
    optimizers: Sequence[Optimizer],
    *,
    low_memory: bool,
) -> int | None:
    """Rewrite modules, move tensors and let the other steps act; undo everything on failure.

    The caller holds interrupts: they act between the steps, where everything can be undone. Returns the
    number of tensors that were moved, or None if there was nothing to do.

    Raises:
        RefusedError: the model cannot be changed now, or one of `optimizers` could not train it.
        PartialError: a failure after old tensors were freed, with `low_memory`.
    """
    actions, moves = work.actions, _all_moves(work.table, optimizers)
    if not (actions or moves):
        return None
    problems = [p for step in chain(*phases.values()) for p in step.obstacles(model)]
    problems += removed_parameters(model, work.model, optimizers)
    raise_problems(RefusedError, [*problems, *precondition_problems(model, work.table)])
    transfer = None
    undo = [Snapshot(model).restore] if actions else []
    undo += [saved_switches()] if phases["runtime"] else []
    try:
        act_on_interrupts()
        if any(action.phase == "structure" for action in actions):
            _rewrite(model, phases["structure"])
            moves = _all_moves(make_table(model, phases["tensors"]), optimizers)
        transfer = Transfer(moves, low_memory=low_memory)
        undo.insert(0, transfer.undo)
        transfer.run()
        for step in _acting(phases):
            act_on_interrupts()
            if list(step.targets(model)):
                step.act(model)
        act_on_interrupts()
        _check_nothing_left(survey(model, phases))
        # Casts that autocast has cached are of the old weights.
        torch.clear_autocast_cache()
        return len(moves)
    except BaseException as error:
        with held_interrupts():
            for restore in undo:
                restore()
        if transfer is not None:
            transfer.raise_partial(error)
        raise


def _rewrite(model: nn.Module, steps: list[ModuleStep]) -> tuple[list[Action], list[ConfigError]]:
    """Run the structure steps on `model`, in order; return their actions and unmatched patterns."""
    actions: list[Action] = []
    unmatched: list[ConfigError] = []
    for step in steps:
        names, errors = targets(model, step)
        unmatched += errors
        touched = dict.fromkeys(names)
        for path, module in step.rewrites(model, names):
            if not path and module is not model:
                raise StepError(f"steps.{step.name}", "the model itself cannot be replaced")
            if path:
                model.set_submodule(path, module)
            touched[path] = None
        if names:
            actions.append(Action(step.name, step.phase, tuple(touched)))
    return actions, unmatched


def check_module(model: object) -> None:
    """Refuse what is not a model, in one line in place of an error from inside."""
    if isinstance(model, nn.Module):
        return
    shown = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise ConfigError("model", f"{shown} is not a torch.nn.Module", "give the model itself")


def _check_nothing_left(after: Survey) -> None:
    """Check the postcondition of `apply`: no step has anything left to do."""
    for action in after.actions:
        names = ", ".join(action.modules[:3]) or "the model"
        raise StepError(f"steps.{action.step}", f"still has work to do on {names} after it ran")
    for request in after.table.requests:
        if request.move():
            wrong = f"{request.path} does not have {dict(request.wants)} after the steps ran"
            raise StepError(f"steps.{', '.join(steps_of(request.by))}", wrong)


def precondition_problems(model: nn.Module, table: RequestTable) -> Iterator[Problem]:
    """Yield every reason not to change `model` now; call it only if there is something to change."""
    if torch.is_inference_mode_enabled():
        wrong = "tensors made in inference_mode can never be trained"
        yield Problem("torch.inference_mode", wrong, "prepare outside it; torch.no_grad is fine")
    yield from module_problems(model)
    moving = [(request, move) for request in table.requests if (move := request.move())]
    wrapped = [r for r, _ in moving if is_wrapper(r.tensor)]
    inference = [r for r, _ in moving if r.tensor.is_inference()]
    with_grad = [r for r, _ in moving if r.tensor.is_leaf and r.tensor.grad is not None]
    from_meta = [r for r, move in moving if r.tensor.is_meta and move.device.type != "meta"]
    if wrapped:
        kinds = ", ".join(sorted({type(r.tensor).__name__ for r in wrapped}))
        wrong = f"{kinds} defines its own meaning of dtype and strides"
        remedy = "prepare before sharding or quantizing, or exclude it"
        yield Problem(_paths(wrapped), wrong, remedy)
    if inference:
        wrong = "made in torch.inference_mode, so it can never be trained"
        yield Problem(_paths(inference), wrong, "build the model outside inference_mode")
    if with_grad:
        wrong = "holds a .grad, which would keep the old layout and dtype"
        yield Problem(_paths(with_grad), wrong, "call zero_grad(set_to_none=True) first")
    for group in table.shared:
        if must_separate(group):
            wrong = "share one storage, which the requested layout would split"
            remedy = "prepare the model before making them views of it, or exclude them"
            yield Problem(_paths(group), wrong, remedy)
    if from_meta:
        remedy = "load it with prepare.checkpoint.load(path, model), which allocates it as wanted"
        yield Problem(_paths(from_meta), "meta holds no data", remedy)


def fsdp_problems(model: nn.Module) -> Iterator[Problem]:
    """Yield a problem if FSDP has put weights into flat shards, which no memory format can match."""
    for name, module in model.named_modules():
        if any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__):
            yield Problem(name or type(module).__name__, *_SHARDED)
            return


def scripted_problems(
    model: nn.Module, remedy: str = "prepare the model first, then script or trace it"
) -> Iterator[Problem]:
    """Yield a problem if the model is scripted or traced, or contains such a module."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            wrong = f"is a {type(module).__name__}: its modules cannot be seen or changed"
            yield Problem(name or type(module).__name__, wrong, remedy)
            return


def module_problems(model: nn.Module) -> Iterator[Problem]:
    """Yield the reasons in how `model` is wrapped, sharded or compiled not to change it."""
    yield from scripted_problems(model)
    for name, module in model.named_modules():
        kinds = [base.__name__ for base in type(module).__mro__]
        kinds += ["OptimizedModule"] if module._compiled_call_impl else []
        if found := next((_FORMS[kind] for kind in kinds if kind in _FORMS), None):
            yield Problem(name or type(model).__name__, *found)


def lazy_problems(table: RequestTable) -> Iterator[Problem]:
    """Yield a problem if parameters have no shape yet; nothing can be planned for them."""
    if lazy := [request for request in table.requests if is_lazy(request.tensor)]:
        wrong = "not initialised yet (a lazy module)"
        yield Problem(_paths(lazy), wrong, "run one forward pass first")


def _paths(requests: Iterable[TensorRequest]) -> str:
    paths = [request.path for request in requests]
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
