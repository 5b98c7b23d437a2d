"""The probable causes of a failed verification, the first one the most probable, each with its remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare.core.forward.float32_calls import CAST_STEP, keep_option
from prepare.core.model.doctor_findings import CallIssues
from prepare.core.model.known_issues import REPAIR_STEP, issues
from prepare.core.model.tensors import named_modules
from prepare.core.utils.wording import dropped, option, step
from prepare.errors import PrepareError
from prepare.patterns import exactly

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.stages.verify.case import Case
    from prepare.stages.verify.records import Lost

_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
_BY_CHECK = {
    "layout": (
        "something undid the preparation, such as load_state_dict(assign=True) or a second cast: apply the "
        "pipeline again"
    ),
    "values": (
        "the reference is not a copy of the same weights, or the model was trained or loaded since: take "
        "copy.deepcopy(model) just before apply"
    ),
    "flags": (
        "model.train() or .eval() was called on a part of one of the two models, or a class does not copy its "
        "mode: call prepared.train(mode) and reference.train(mode) with the same mode"
    ),
    "batch": (
        "an operation in place works on the batch itself, where the unprepared model had a copy, such as that "
        "of contiguous(): take one that is not in place, or call model(batch.clone())"
    ),
    "output memory": (
        "a kernel or backend writes the outputs of all calls into one buffer: use or clone the outputs before "
        "the next call"
    ),
}


def advice(
    cases: Sequence[Case], failed: Collection[str], culprit: str | None, losses: Sequence[Lost]
) -> str:
    """Return the causes of the failed kinds of checks as one paragraph; `culprit` is the first wrong module."""
    listed = (
        f"({chr(97 + i)}) {cause}"
        for i, cause in enumerate(_causes(cases, failed, culprit, losses))
    )
    return "If you expected this to work, it may be that " + ", or that ".join(listed) + "."


def _causes(
    cases: Sequence[Case], failed: Collection[str], culprit: str | None, losses: Sequence[Lost]
) -> Iterator[str]:
    case = next((c for c in cases if c.is_wrong), cases[0])
    module = dict(named_modules(case.prepared)).get(culprit) if culprit is not None else None
    name = culprit or (type(case.prepared).__name__ if culprit is not None else "NAME")
    pipeline = case.pipeline
    steps: Mapping[str, Any] = pipeline.to_config() if pipeline else {}
    repair = _repair(case, steps)
    if case.compiled:
        yield (
            "the compiler computes something else than the modules do: choose another backend or mode of the "
            f"step compile, or remove it with {dropped('compile')}"
        )
    for each in cases:
        if each.raised:
            yield f"its forward cannot run on the prepared inputs: {each.raised}"
        if each.unsafe:
            what = next(i.what for i in issues() if i.name == each.unsafe[1])
            place = each.unsafe[0] or "the model"
            yield f"{place} is one whose backward may end the process: {what} [{each.unsafe[1]}]; {repair}exclude it"
    flushed = next(
        (x for x in losses if x.flushed and x.tensor.rpartition(".")[0] == culprit), None
    )
    if flushed is not None:
        count = f"{flushed.flushed} of {flushed.elements} numbers of {flushed.tensor}"
        yield f"{count} became 0 in {flushed.after}: {_keep(steps, name)}"
    if "casts" in failed:
        clamp = option(CAST_STEP, "clamp", value=True)
        yield (
            f"{_half(steps)} cannot hold its numbers, which became infinite, and make NaN of results: "
            f"{_keep(steps, name)}, or clamp them with {clamp}"
        )
    yield from (cause for kind, cause in _BY_CHECK.items() if kind in failed)
    if failed and {*_BY_CHECK, "casts"}.issuperset(failed):
        return
    formats = _formats(pipeline, case.reference) if pipeline else {}
    inexact = list(_inexact(case)) if formats and case.mode == "train" else []
    if formats and isinstance(module, _NORMS):
        kind = type(module).__name__
        other = f"exclude the convolutions around it with {option(formats[0], 'exclude', [...])}"
        yield f"torch's {kind} is wrong for channels-last tensors on this device: {repair}{other}"
    elif formats and not inexact:
        remedy = _exclusion(case, formats, culprit) or f"remove the step with {dropped(formats[0])}"
        yield (
            f"the code of {name} depends on the layout of tensors (view, as_strided, a custom kernel): "
            f"{repair}{remedy}"
        )
    for sentence in inexact:
        remedy = f"add {step(REPAIR_STEP, exact=True)}"
        if REPAIR_STEP in steps:
            remedy = f"set {option(REPAIR_STEP, 'exact', value=True)}"
        yield f"digits are lost in {sentence}: {remedy}"
    if CAST_STEP in steps and "casts" not in failed and flushed is None:
        yield f"{name} needs more precision or a wider range than {_half(steps)} has: {_keep(steps, name)}"
    yield "the model computes something else at every call, or one of its hooks changes gradients"


def _repair(case: Case, steps: Mapping[str, Any]) -> str:
    can = REPAIR_STEP not in steps and _is_possible(case, {REPAIR_STEP: {}})
    return f"add {step(REPAIR_STEP)}, or " if can else ""


def _inexact(case: Case) -> Iterator[str]:
    """Yield known issues of lost digits that calls of this case had, and that an exact repair mends."""
    modules, seen = dict(named_modules(case.prepared)), set[str]()
    for name, shape in case.shapes.items():
        device = next((tensor.device.type for tensor in modules[name].parameters()), "cpu")
        for issue in CallIssues(device, effect="inexact").of(modules[name], shape):
            if case.flags.get(name) and issue.name not in seen:
                seen.add(issue.name)
                yield f"{name}: {issue.what} [{issue.name}]"


def _exclusion(case: Case, formats: Sequence[str], culprit: str | None) -> str:
    """Return the option that leaves the convolutions of a module as they were; empty if there is none."""
    steps = case.pipeline.to_config() if case.pipeline else {}
    for each in formats:
        known = (steps[each] or {}).get("exclude", ())
        for pattern in (exactly(culprit), f"{culprit}.*") if culprit else ():
            excluded = [*known, pattern]
            if _is_possible(case, {each: {**(steps[each] or {}), "exclude": excluded}}):
                return f"exclude it with {option(each, 'exclude', excluded)}"
    return ""


def _is_possible(case: Case, changes: Mapping[str, Any]) -> bool:
    """Return True if the pipeline with these steps can be applied as well as it can without the changes."""
    if case.pipeline is None:
        return False
    from prepare.pipeline import Pipeline

    steps, problems = case.pipeline.to_config(), list[set[str]]()
    for tried in (steps, {**steps, **changes}):
        try:
            plan = Pipeline.from_config(tried).plan(case.reference, known_issues="ignore")
        except PrepareError:
            return False
        problems.append({str(problem) for error in plan.errors for problem in error.problems})
    return problems[1] <= problems[0]


def _formats(pipeline: Pipeline, model: nn.Module) -> list[str]:
    """Return the steps that convert convolutions to channels-last and can exclude any."""
    from prepare.pipeline.collect_wants import format_steps

    requested = format_steps(pipeline.steps.values(), model)
    wanted = (name for name, formats in requested.items() if {*formats.values()} - {"contiguous"})
    return [name for name in wanted if "exclude" in pipeline.steps[name].to_options()]


def _half(steps: Mapping[str, Any]) -> str:
    return str((steps.get(CAST_STEP) or {}).get("dtype", "its new dtype"))


def _keep(steps: Mapping[str, Any], name: str) -> str:
    other = (
        f", or use {option(CAST_STEP, 'dtype', 'bfloat16')}" if _half(steps) == "float16" else ""
    )
    return f"add {keep_option(name)}{other}"
