"""The probable causes of a failed verification, the first one the most probable, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from prepare.core.forward.float32_calls import CAST_STEP, keep_option
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.model.tensors import name_of, named_modules
from prepare.core.utils.wording import dropped, option, step
from prepare.errors import PrepareError
from prepare.patterns import exactly

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.stages.verify.case import VerificationCase
    from prepare.stages.verify.records import Check

# Noise of so many times the tensor itself.
_GARBAGE = 4.0
_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BY_CHECK = {
    "layout": "something undid the preparation, such as load_state_dict(assign=True) or a second cast: "
    "apply the pipeline again",
    "values": "the reference is not a copy of the same weights, or the model was trained or loaded since: "
    "take copy.deepcopy(model) just before apply",
    "flags": "model.train() or .eval() was called on a part of one model, or a class does not copy its mode: "
    "call prepared.train(mode) and reference.train(mode) with the same mode",
    "batch": "an operation in place works on the batch itself, where the unprepared model had a copy: take "
    "one that is not in place, or call model(batch.clone())",
}


def advice(case: VerificationCase, checks: Sequence[Check], culprit: str | None) -> str:
    """Return the causes of what these checks found as a paragraph; `culprit` is the first wrong module."""
    causes = (f"({chr(97 + i)}) {cause}" for i, cause in enumerate(_causes(case, checks, culprit)))
    return "If you expected this to work, it may be that " + ", or that ".join(causes) + "."


def _causes(case: VerificationCase, checks: Sequence[Check], culprit: str | None) -> Iterator[str]:
    module = dict(named_modules(case.prepared)).get(culprit or "")
    name = culprit or (type(case.prepared).__name__ if culprit is not None else "NAME")
    steps: Mapping[str, Any] = case.pipeline.to_config() if case.pipeline else {}
    can_repair = REPAIR_STEP not in steps and _is_possible(case, {REPAIR_STEP: {}})
    repair = f"add {step(REPAIR_STEP)}, or " if can_repair else ""
    failed = {check.what for check in checks if check.status in ("fail", "wrong")}
    if case.compiled:
        remedy = f"choose another backend or mode of the step compile, or remove it with {dropped('compile')}"
        yield f"the compiler computes something else than the modules do: {remedy}"
    if case.raised:
        yield f"its forward cannot run on the prepared inputs: {case.raised}"
    if case.unsafe:
        place, issue = case.unsafe
        yield f"the backward of {place or 'the model'} may end the process [{issue}]: {repair}exclude it"
    half = str((steps.get(CAST_STEP) or {}).get("dtype", "its new dtype"))
    keep = f"add {keep_option(name)}"
    keep += f", or use {option(CAST_STEP, 'dtype', 'bfloat16')}" if half == "float16" else ""
    lost = next((c for c in checks if c.what == "casts" and c.note), None)
    if "casts" not in failed and lost is not None and lost.worst.rpartition(".")[0] == culprit:
        yield f"{lost.note}: {keep}"
    if any(item.noise > _GARBAGE for item in case.wrong):
        low = f"torch itself is wrong in {name} in {name_of(case.dtype)} on this device"
        yield f"{low}: the unprepared model, in the contiguous format, is as far off"
    if "casts" in failed:
        clamp = option(CAST_STEP, "clamp", value=True)
        yield f"{half} cannot hold its numbers, which became infinite: {keep}, or clamp them with {clamp}"
    yield from (cause for kind, cause in _BY_CHECK.items() if kind in failed)
    if {*_BY_CHECK, "casts"}.issuperset(failed):
        return
    exact = {REPAIR_STEP: {**(steps.get(REPAIR_STEP) or {}), "exact": True}}
    is_inexact = (
        isinstance(module, _BATCH_NORMS) and case.mode == "train" and _is_possible(case, exact)
    )
    if is_inexact and CAST_STEP not in steps:
        remedy = f"add {step(REPAIR_STEP, exact=True)}"
        if REPAIR_STEP in steps:
            remedy = f"set {option(REPAIR_STEP, 'exact', value=True)}"
        yield f"digits are lost in the sums of {name} [batch_norm_sums_cpu]: {remedy}"
    elif formats := _formats(case.pipeline, case.reference) if case.pipeline else []:
        remedy = (
            _exclusion(case, steps, formats, culprit)
            or f"remove the step with {dropped(formats[0])}"
        )
        what = f"the code of {name} depends on the layout of tensors (view, as_strided, a custom kernel)"
        if isinstance(module, _NORMS):
            what = (
                f"torch's {type(module).__name__} is wrong for channels-last tensors on this device"
            )
        yield f"{what}: {repair}{remedy}"
    if CAST_STEP in steps and "casts" not in failed:
        yield f"{name} needs more precision or a wider range than {half} has: {keep}"
    yield "the model computes something else at every call, or one of its hooks changes gradients"


def _exclusion(
    case: VerificationCase, steps: Mapping[str, Any], formats: Sequence[str], culprit: str | None
) -> str:
    """Return the option that leaves the convolutions of a module as they were; empty if there is none."""
    for each in formats:
        own = steps[each] or {}
        can_exclude = (
            case.pipeline is not None and "exclude" in case.pipeline.steps[each].to_options()
        )
        for pattern in (exactly(culprit), f"{culprit}.*") if culprit and can_exclude else ():
            excluded = [*own.get("exclude", ()), pattern]
            if _is_possible(case, {each: {**own, "exclude": excluded}}):
                return f"exclude it with {option(each, 'exclude', excluded)}"
    return ""


def _is_possible(case: VerificationCase, changes: Mapping[str, Any]) -> bool:
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
    """Return the steps that convert convolutions to channels-last."""
    from prepare.pipeline.collect_wants import format_steps

    requested = format_steps(pipeline.steps.values(), model)
    return [name for name, formats in requested.items() if {*formats.values()} - {"contiguous"}]
