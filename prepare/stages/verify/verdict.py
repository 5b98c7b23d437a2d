"""Conclude a verification from its checks: status, reason, first wrong module, and advice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from prepare.core.forward.float32_calls import CAST_STEP, keep_option
from prepare.core.model.call_issues import CallIssues, describe
from prepare.core.model.known_issues import REPAIR_STEP, issues
from prepare.core.model.tensors import name_of, named_modules
from prepare.core.utils.machine import environment
from prepare.core.utils.wording import dropped, option, step
from prepare.errors import PrepareError
from prepare.patterns import exactly
from prepare.stages.verify.compare_modules import MODULE_FIELDS
from prepare.stages.verify.records import Check, Lost, Verification

if TYPE_CHECKING:
    import torch

    from prepare.stages.verify.compare_case import CaseComparison
    from prepare.stages.verify.execution.budget import Budget
    from prepare.stages.verify.execution.runner import ModelPair

_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
# A cast is the cause if it alone moves the outputs of a module by this fraction of their scale.
_LOSSY = 0.1
# The checks whose causes are not in what the modules compute.
_STATIC = frozenset({"flags", "values", "casts", "layout", "batch", "output memory"})


def conclude(
    models: ModelPair,
    checks: list[Check],
    comparisons: list[CaseComparison],
    losses: tuple[Lost, ...],
    *,
    level: str,
    mode: str,
    budget: Budget,
) -> Verification:
    """Conclude from the checks; run the models again to find the first wrong module if a check failed."""
    bad = [check for check in checks if check.status in ("fail", "wrong")]
    first = {check.status: check for check in reversed(checks)}
    status = next((word for word in ("fail", "cannot tell") if word in first), "pass")
    worst = first.get("wrong" if status == "pass" else status)
    culprit, advice = _diagnose(models, bad, comparisons, losses) if bad else ("", "")
    exact_dtypes = [
        name_of(c.exact_dtype) for c in comparisons if c.exact_dtype and not c.case.outputs_only
    ]
    return Verification(
        status=status,
        reason=_reason(worst) if worst else "",
        level=level,
        mode=mode,
        reference=max(exact_dtypes, default="", key=lambda name: name == "float32"),
        checks=tuple(checks),
        lost=losses,
        culprit=culprit,
        advice=advice,
        seconds=round(budget.spent(), 3),
        environment=environment(),
        amp=models.amp,
    )


def _owner(loss: Lost) -> str:
    return loss.tensor.rpartition(".")[0]


def _diagnose(
    models: ModelPair,
    bad: list[Check],
    comparisons: list[CaseComparison],
    losses: tuple[Lost, ...],
) -> tuple[str, str]:
    """Return the culprit by its dotted name, the model itself by its class name; and the advice."""
    failed = next((c for c in comparisons if any(map(c.exceeding, c.differences))), None)
    by_compiler = failed is not None and failed.compiled
    name: str | None = ""
    shape: torch.Size | None = None
    if failed is None:
        name = next((check.worst for check in bad if not check.mode), None)
    elif not by_compiler:
        name, shape = _first_wrong_module(failed)
    unsafe = next((c.unsafe for c in comparisons if c.unsafe is not None), None)
    if unsafe is not None and failed is None:
        name = unsafe.unsafe_module
    module = None if name is None else dict(named_modules(models.prepared)).get(name)
    culprit = name or (type(models.prepared).__name__ if name is not None else "")
    differences = [
        item for c in comparisons for kind in c.differences for item in c.exceeding(kind)
    ]
    flushed = next((loss for loss in losses if loss.flushed and _owner(loss) == name), None)
    baseline_wrong = any(item.is_baseline_wrong for item in differences)
    causes = causes_of(
        failed={check.what for check in bad},
        culprit=culprit,
        module=module,
        steps=models.pipeline.to_config() if models.pipeline else {},
        raised=next((c.raised for c in comparisons if c.raised), ""),
        baseline_wrong_in=name_of(models.dtype) if baseline_wrong and not flushed else "",
        flushed=flushed,
        by_compiler=by_compiler,
        at_this_size=_issues_of(module, shape) if unsafe is None else _unsafe(unsafe.unsafe_issue),
        inexact=_inexact(models, failed) if failed else (),
        exclude=_exclusion(models, name) if name is not None else None,
        repairs=_is_possible(models, {REPAIR_STEP: {}}),
        reference=models.reference,
    )
    return culprit, advise(causes)


def _inexact(models: ModelPair, failed: CaseComparison) -> tuple[str, ...]:
    """Return known issues of lost digits that calls of this case had, and that an exact repair mends."""
    steps = models.pipeline.to_config() if models.pipeline else {}
    exact = {REPAIR_STEP: {**(steps.get(REPAIR_STEP) or {}), "exact": True}}
    if failed.case.mode != "train" or not _formats(steps, models.reference):
        return ()
    if not _is_possible(models, exact):
        return ()
    modules, issues = dict(named_modules(models.prepared)), dict[str, Any]()
    for name, shape in failed.modules_alone().shapes.items():
        module = modules[name]
        device = next((tensor.device.type for tensor in module.parameters()), "cpu")
        if failed.runner.flags.get(name):
            for issue in CallIssues(device, effect="inexact").of(module, shape):
                issues.setdefault(issue.name, (name, issue))
    return tuple(f"{name}: {issue.what} [{issue.name}]" for name, issue in issues.values())


def _exclusion(models: ModelPair, name: str) -> str | None:
    """Return the option that leaves the convolutions of a module as they were; None if there is none."""
    steps = models.pipeline.to_config() if models.pipeline else {}
    formats = _formats(steps, models.reference)
    for each in filter(formats.get, formats):
        known = (steps[each] or {}).get("exclude", ())
        for pattern in (exactly(name), f"{name}.*") if name else ():
            exclude = [*known, pattern]
            if _is_possible(models, {each: {**(steps[each] or {}), "exclude": exclude}}):
                return option(each, "exclude", exclude)
    return None


def _is_possible(models: ModelPair, changes: Mapping[str, Any]) -> bool:
    """Return True if the pipeline with these steps can be applied as well as it can without the changes."""
    if models.pipeline is None:
        return False
    from prepare.pipeline import Pipeline

    steps, problems = models.pipeline.to_config(), list[set[str]]()
    for tried in (steps, {**steps, **changes}):
        try:
            plan = Pipeline.from_config(tried).plan(models.reference, known_issues="ignore")
        except PrepareError:
            return False
        problems.append({str(problem) for error in plan.errors for problem in error.problems})
    return problems[1] <= problems[0]


def _formats(steps: Mapping[str, Any], model: nn.Module | None) -> dict[str, bool]:
    """Return the steps that convert convolutions to channels-last, and whether they can exclude any."""
    from prepare.pipeline import Pipeline
    from prepare.pipeline.collect_wants import format_steps

    made = Pipeline.from_config(steps).steps
    requested = format_steps(made.values(), model)
    wanted = (name for name, formats in requested.items() if {*formats.values()} - {"contiguous"})
    return {name: "exclude" in made[name].to_options() for name in wanted}


def _unsafe(name: str) -> tuple[str, ...]:
    """Return the known issue of that name, as the end of a sentence about a module."""
    return tuple(
        f"one whose backward may end the process: {issue.what} [{name}]"
        for issue in issues()
        if issue.name == name
    )


def _issues_of(module: nn.Module | None, shape: torch.Size | None) -> tuple[str, ...]:
    """Return the known issues that a call of `module` has at this size."""
    if module is None or shape is None:
        return ()
    device = next((tensor.device.type for tensor in module.parameters()), "cpu")
    return tuple(map(describe, CallIssues(device).of(module, shape)))


def _reason(check: Check) -> str:
    case = ", ".join(filter(None, (check.mode and f"{check.mode} mode", check.inputs)))
    case += f", batch {check.batch}" if check.batch else ""
    head = f"{check.what} ({case})" if case else check.what
    if check.note:
        joint = ": " if check.note.startswith(("the ", "not ")) else " "
        subject = f"{check.worst}{joint}" if check.worst and check.worst not in check.note else ""
        return f"{head}: {subject}{check.note}"
    if check.error is None:
        return f"{head}: {check.worst} is infinitely far from the reference"
    off = f"{check.worst} is off by {check.error:.2g} of its scale"
    return f"{head}: {off}, and the tolerance is {check.allowed:.2g}"


def _first_wrong_module(comparison: CaseComparison) -> tuple[str | None, torch.Size | None]:
    """Return the first module that is wrong, and the shape of its input.

    A module that is wrong alone is the first, since each module got the inputs that it had. Alone it has the
    weights of the prepared model; if none is wrong with these, it is the one that lost the most by its cast.
    Else return the owner of the worst gradient or buffer.
    """
    alone = comparison.modules_alone()
    for kind in MODULE_FIELDS:
        if wrong := [item for item in alone.deviations.get(kind, []) if item.exceeds]:
            return wrong[0].name, alone.shapes.get(wrong[0].name)
    lossy = max(alone.by_loss, key=lambda name: alone.by_loss[name], default="")
    if alone.by_loss.get(lossy, 0.0) > _LOSSY:
        return lossy, None
    worst = [*comparison.exceeding("parameter gradients"), *comparison.exceeding("buffers")]
    return (worst[0].name.rpartition(".")[0] if worst else None), None


def causes_of(  # noqa: PLR0912  one branch for each cause
    *,
    failed: Collection[str],
    culprit: str,
    module: nn.Module | None,
    steps: Mapping[str, Any],
    raised: str = "",
    baseline_wrong_in: str = "",
    flushed: Lost | None = None,
    by_compiler: bool = False,
    at_this_size: Iterable[str] = (),
    inexact: Iterable[str] = (),
    exclude: str | None = None,
    repairs: bool = True,
    reference: nn.Module | None = None,
) -> Iterator[str]:
    """Yield the possible causes of a failure, the most probable first, each with its remedy.

    `failed` holds the kinds of the failed checks, `culprit` the name of `module`, `steps` the pipeline's
    configuration, `raised` the error of the forward. `baseline_wrong_in` is the dtype, if the unprepared
    model is as wrong in it. `flushed`: numbers of a tensor of `module` became 0. `by_compiler`: all is right
    without the compiler. `at_this_size`: the known issues of a call of this size, as sentences; `inexact`:
    those that an exact repair mends. `exclude` is the option that leaves the convolutions of `module` as they
    were; None if it has none. `repairs`: the step repair_layout would change something. `reference` is the
    unprepared model.
    """
    formats, inexact = _formats(steps, reference), tuple(inexact)
    half, name = steps.get(CAST_STEP), culprit or "NAME"
    repair = "" if REPAIR_STEP in steps or not repairs else f"add {step(REPAIR_STEP)}, or "
    if by_compiler:
        yield (
            "the compiler computes something else than the modules do: choose another backend or mode of the "
            f"step compile, or remove it with {dropped('compile')}"
        )
    if raised:
        yield f"its forward cannot run on the prepared inputs: {raised}"
    for sentence in at_this_size:
        yield f"{name} is {sentence}; {repair}exclude it"
    if flushed is not None:
        count = f"{flushed.flushed} of {flushed.elements} numbers of {flushed.tensor}"
        yield f"{count} became 0 in {flushed.after}: {_keep(steps, name)}"
    if baseline_wrong_in:
        yield (
            f"torch itself is wrong in {name} in {baseline_wrong_in} on this device: the unprepared "
            "model in that dtype, in the contiguous format, is as far off"
        )
    if "layout" in failed:
        yield (
            "something undid the preparation, such as load_state_dict(assign=True) or a second cast: "
            "apply the pipeline again"
        )
    if "values" in failed:
        yield (
            "the reference is not a copy of the same weights, or the model was trained or loaded since: "
            "take copy.deepcopy(model) just before apply"
        )
    if "flags" in failed:
        yield (
            "model.train() or .eval() was called on a part of one of the two models, or a class does not "
            "copy its mode: call prepared.train(mode) and reference.train(mode) with the same mode"
        )
    if "casts" in failed:
        yield (
            f"{_half_dtype(half)} cannot hold its numbers, which became infinite, and make NaN of results: "
            f"{_keep(steps, name)}, or clamp them with {option(CAST_STEP, 'clamp', value=True)}"
        )
    if "batch" in failed:
        yield (
            "an operation in place works on the batch itself, where the unprepared model had a copy, such as "
            "that of contiguous(): take one that is not in place, or call model(batch.clone())"
        )
    if "output memory" in failed:
        yield (
            "a kernel or backend writes the outputs of all calls into one buffer: use or clone the outputs "
            "before the next call"
        )
    if failed and _STATIC.issuperset(failed):
        return
    if formats and isinstance(module, _NORMS):
        yield (
            f"torch's {type(module).__name__} is wrong for channels-last tensors on this device: "
            f"{repair}{_without_convolutions(formats)}"
        )
    if half and "casts" not in failed and flushed is None:
        yield (
            f"{name} needs more precision or a wider range than {_half_dtype(half)} has: "
            f"{_keep(steps, name)}"
        )
    for sentence in inexact:
        remedy = f"add {step(REPAIR_STEP, exact=True)}"
        if REPAIR_STEP in steps:
            remedy = f"set {option(REPAIR_STEP, 'exact', value=True)}"
        yield f"digits are lost in {sentence}: {remedy}"
    if formats and not inexact and not isinstance(module, _NORMS):
        remedy = (
            f"exclude it with {exclude}"
            if exclude
            else f"remove the step with {dropped(next(iter(formats)))}"
        )
        yield (
            f"the code of {name} depends on the layout of tensors (view, as_strided, a custom kernel): "
            f"{repair}{remedy}"
        )
    yield "the model computes something else at every call, or one of its hooks changes gradients"


def _without_convolutions(formats: Mapping[str, bool]) -> str:
    """Return how the convolutions around a module stay as they were."""
    for name in filter(formats.get, formats):
        return f"exclude the convolutions around it with {option(name, 'exclude', [...])}"
    return f"remove the step with {dropped(next(iter(formats)))}"


def advise(causes: Iterable[str]) -> str:
    """Return a paragraph that lists the causes."""
    listed = (f"({chr(97 + i)}) {cause}" for i, cause in enumerate(causes))
    return "If you expected this to work, it may be that " + ", or that ".join(listed) + "."


def _half_dtype(half: Any) -> str:
    """Return the dtype that the step `half` casts to."""
    return str((half or {}).get("dtype", "its new dtype"))


def _keep(steps: Mapping[str, Any], name: str) -> str:
    keep = f"add {keep_option(name)}"
    if _half_dtype(steps.get(CAST_STEP)) == "float16":
        return f"{keep}, or use {option(CAST_STEP, 'dtype', 'bfloat16')}"
    return keep
