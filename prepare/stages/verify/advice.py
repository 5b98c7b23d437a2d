"""The probable causes of a failed verification, the first one the most probable, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from prepare.core.forward.input_formatter import CAST_STEP, keep_option
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.model.tensors import name_of, named_modules
from prepare.core.utils.text import dropped, option, step
from prepare.patterns import exactly
from prepare.pipeline.tensor_table import format_steps
from prepare.stages.verify.deviations import GARBAGE

if TYPE_CHECKING:
    from prepare.stages.verify.case import VerificationCase
    from prepare.stages.verify.records import Check

_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BY_CHECK = {
    "layout": "something undid the preparation, such as load_state_dict(assign=True) or a second cast: "
    "apply the pipeline again",
    "values": "the reference is not a copy of the same weights, or the model was trained or loaded since: "
    "take copy.deepcopy(model) just before apply",
    "flags": "model.train() or .eval() was called on a part of one model, or a class does not copy its mode: "
    "call prepared.train(mode) and reference.train(mode) with the same mode",
}


def advice(case: VerificationCase, checks: Sequence[Check], culprit: str | None) -> str:
    """Return the causes of what these checks found as a paragraph; `culprit` is the first wrong module."""
    causes = (f"({chr(97 + i)}) {cause}" for i, cause in enumerate(_causes(case, checks, culprit)))
    return "If you expected this to work, it may be that " + ", or that ".join(causes) + "."


def _causes(case: VerificationCase, checks: Sequence[Check], culprit: str | None) -> Iterator[str]:
    module = dict(named_modules(case.prepared)).get(culprit or "")
    name = culprit or (type(case.prepared).__name__ if culprit is not None else "NAME")
    steps: Mapping[str, Any] = case.pipeline.to_config() if case.pipeline else {}
    repair = "" if REPAIR_STEP in steps else f"add {step(REPAIR_STEP)}, or "
    failed = {check.what for check in checks if check.status in ("fail", "wrong")}
    if any(check.inputs == "compiled" for check in checks):
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
    if any(item.noise > GARBAGE for item in case.wrong):
        low = f"torch itself is wrong in {name} in {name_of(case.dtype)} on this device"
        yield f"{low}: the unprepared model, in the contiguous format, is as far off"
    if "casts" in failed:
        clamp = option(CAST_STEP, "clamp", value=True)
        yield f"{half} cannot hold its numbers, which became infinite: {keep}, or clamp them with {clamp}"
    yield from (cause for kind, cause in _BY_CHECK.items() if kind in failed)
    if {*_BY_CHECK, "casts"}.issuperset(failed):
        return
    own_steps = case.pipeline.steps if case.pipeline else {}
    wanted = format_steps(own_steps.values(), case.reference)
    formats = [each for each, found in wanted.items() if {*found.values()} - {"contiguous"}]
    if isinstance(module, _BATCH_NORMS) and case.mode == "train" and CAST_STEP not in steps:
        exact = option(REPAIR_STEP, "exact", value=True)
        remedy = f"set {exact}" if REPAIR_STEP in steps else f"add {step(REPAIR_STEP, exact=True)}"
        yield f"digits are lost in the sums of {name} [batch_norm_sums_cpu]: {remedy}"
    elif formats:
        what = f"the code of {name} depends on the layout of tensors (view, as_strided, a custom kernel)"
        if isinstance(module, _NORMS):
            what = (
                f"torch's {type(module).__name__} is wrong for channels-last tensors on this device"
            )
        remedy = f"remove the step with {dropped(formats[0])}"
        can_exclude = "exclude" in own_steps[formats[0]].to_options()
        parts = module.modules() if module and culprit and can_exclude else ()
        if any(isinstance(each, _ConvNd) for each in parts):
            own = exactly(culprit or "") if isinstance(module, _ConvNd) else f"{culprit}.*"
            excluded = [*(steps[formats[0]] or {}).get("exclude", ()), own]
            remedy = f"exclude it with {option(formats[0], 'exclude', excluded)}"
        yield f"{what}: {repair}{remedy}"
    if CAST_STEP in steps and "casts" not in failed:
        yield f"{name} needs more precision or a wider range than {half} has: {keep}"
    yield "the model computes something else at every call, or one of its hooks changes gradients"
