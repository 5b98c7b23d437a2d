"""Advise on a failed verification: the probable causes, and what to change in the steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from prepare.core.utils.wording import dropped, option, step

_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
_FORMAT_STEPS = ("conv2d_memory_format", "conv3d_memory_format")
# The checks without a forward: their causes are not in what the modules compute.
_STATIC = frozenset({"metric", "flags", "values", "casts", "layout"})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The facts about a failed verification.

    `failed` holds the kinds of the failed checks, `culprit` the name of `module`, `steps` the pipeline's
    configuration, `raised` the error of the forward. `baseline_wrong_in` is the dtype, if the unprepared
    model is as wrong in it. `by_compiler`: all is right without the compiler. `at_this_size`: the known
    issues of a call of this size, as sentences.
    """

    failed: frozenset[str]
    culprit: str
    module: nn.Module | None
    steps: Mapping[str, Any]
    raised: str = ""
    baseline_wrong_in: str = ""
    by_compiler: bool = False
    at_this_size: tuple[str, ...] = ()


def advise(fault: Fault) -> str:
    """Return a paragraph that lists possible causes, the most probable first, each with its remedy."""
    causes = (f"({chr(97 + i)}) {cause}" for i, cause in enumerate(_causes(fault)))
    return "If you expected this to work, it may be that " + ", or that ".join(causes) + "."


def _causes(fault: Fault) -> Iterable[str]:  # noqa: PLR0912  one branch for each cause
    module, steps = fault.module, fault.steps
    formats = [name for name in _FORMAT_STEPS if name in steps and _is_channels_last(steps[name])]
    half, name = steps.get("half"), fault.culprit or "NAME"
    repair = "" if "repair_layout" in steps else f"add {step('repair_layout')}, or "
    if fault.by_compiler:
        yield (
            "the compiler computes something else than the modules do: choose another backend or mode of the "
            f"step compile, or remove it with {dropped('compile')}"
        )
    if fault.raised:
        yield f"its forward cannot run on the prepared inputs: {fault.raised}"
    for sentence in fault.at_this_size:
        yield f"{name} is {sentence}; {repair}exclude it"
    if fault.baseline_wrong_in:
        yield (
            f"torch itself is wrong in {name} in {fault.baseline_wrong_in} on this device: the unprepared "
            "model in that dtype, in the contiguous format, is as far off"
        )
    if "layout" in fault.failed:
        yield (
            "something undid the preparation, such as load_state_dict(assign=True) or a second cast: "
            "apply the pipeline again"
        )
    if "values" in fault.failed:
        yield (
            "the reference is not a copy of the same weights, or the model was trained or loaded since: "
            "take copy.deepcopy(model) just before apply"
        )
    if "flags" in fault.failed:
        yield (
            "model.train() or .eval() was called on a part of one of the two models, or a class does not "
            "copy its mode: call prepared.train(mode) and reference.train(mode) with the same mode"
        )
    if "casts" in fault.failed:
        yield (
            f"{_half_dtype(half)} cannot hold its numbers, which became infinite, and make NaN of results: "
            f"{_keep(steps, name)}, or clamp them with {option('half', 'clamp', value=True)}"
        )
    if "metric" in fault.failed:
        yield (
            "the metric is more sensitive to the errors of the dtype than the tolerance of outputs: allow a "
            "larger max_drop, or take a precision with more digits"
            + (", or keep the modules that prepare.tune.keep_in_float32 finds" if half else "")
        )
    if fault.failed and fault.failed <= _STATIC:
        return
    if formats and isinstance(module, _NORMS):
        yield (
            f"torch's {type(module).__name__} is wrong for channels-last tensors on this device: "
            f"{repair}exclude the convolutions around it with {option(formats[0], 'exclude', [...])}"
        )
    if half and "casts" not in fault.failed:
        yield (
            f"{name} needs more precision or a wider range than {_half_dtype(half)} has: "
            f"{_keep(steps, name)}"
        )
    if formats and not isinstance(module, _NORMS):
        yield (
            f"the code of {name} depends on the layout of tensors (view, as_strided, a custom kernel): "
            f"{repair}exclude it with {option(formats[0], 'exclude', [name])}"
        )
    yield "the model computes something else at every call, or one of its hooks changes gradients"


def _half_dtype(half: Any) -> str:
    """Return the dtype that the step `half` casts to."""
    return str((half or {}).get("dtype", "its new dtype"))


def _keep(steps: Mapping[str, Any], name: str) -> str:
    keep = option("half", "keep", ["norms", name])
    if _half_dtype(steps.get("half")) == "float16":
        return f"add {keep}, or use {option('half', 'dtype', 'bfloat16')}"
    return f"add {keep}"


def _is_channels_last(options: Any) -> bool:
    return str((options or {}).get("memory_format", "channels_last")).startswith("channels_last")
