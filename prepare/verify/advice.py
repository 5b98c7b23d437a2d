"""What probably made a prepared model go wrong, and what to add to the steps: as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
_FORMAT_STEPS = ("conv2d_memory_format", "conv3d_memory_format")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is known of a failure.

    `what` are the kinds of the checks that failed; `culprit` is the name of `module`; `steps` the
    pipeline's configuration; `raised` what forward raised; `plainly_wrong` the dtype, if the
    unprepared model is as wrong in it; `by_compiler` says that all is right without
    the compiler.
    """

    what: frozenset[str]
    culprit: str
    module: nn.Module | None
    steps: Mapping[str, Any]
    raised: str = ""
    plainly_wrong: str = ""
    by_compiler: bool = False


def advise(fault: Fault) -> str:
    """A paragraph: what it may be, the most probable cause first, and what to do about each."""
    letters = (f"({chr(97 + i)}) {cause}" for i, cause in enumerate(_causes(fault)))
    return "If you expected this to work, it may be that " + ", or that ".join(letters) + "."


def _causes(fault: Fault) -> Iterable[str]:
    what, module, steps = fault.what, fault.module, fault.steps
    raised, plainly_wrong, culprit = fault.raised, fault.plainly_wrong, fault.culprit
    formats = [name for name in _FORMAT_STEPS if name in steps and _is_last(steps[name])]
    half, name = steps.get("half"), culprit or "NAME"
    repair = "" if "repair_layout" in steps else "add +steps.repair_layout={}, or "
    if fault.by_compiler:
        yield (
            "the compiler computes something else than the modules do: choose another steps.compile.backend "
            "or steps.compile.mode, or drop it with steps.compile=null"
        )
    if raised:
        yield f"its forward cannot take what it is given: {raised}"
    if plainly_wrong:
        yield (
            f"torch itself is wrong in {name} in {plainly_wrong} on this device: the unprepared model in "
            "that dtype, in the contiguous format, is as far off"
        )
    if "layout" in what:
        yield (
            "something undid the preparation, as load_state_dict(assign=True) or a second cast does: "
            "apply the pipeline again"
        )
    if "values" in what:
        yield (
            "the reference is no copy of the same weights, or the model was trained or loaded since: "
            "take copy.deepcopy(model) just before apply"
        )
    if "flags" in what:
        yield "model.train() or .eval() was called on a part of one of the two models"
    if "casts" in what:
        yield f"{_half_word(half)} cannot hold its numbers: {_keep(steps, name)}"
    if formats and isinstance(module, _NORMS):
        yield (
            f"torch's {type(module).__name__} is wrong for channels-last tensors on this device: "
            f"{repair}exclude the convolutions around it with steps.{formats[0]}.exclude=[...]"
        )
    if half and "casts" not in what:
        yield f"{name} needs more digits or a wider range than {_half_word(half)} has: {_keep(steps, name)}"
    if formats and not isinstance(module, _NORMS):
        yield (
            f"the code of {name} depends on how tensors lie (view, as_strided, a kernel of its own): "
            f"{repair}leave it out with steps.{formats[0]}.exclude=[{name}]"
        )
    yield "the model changes what it computes from call to call, or a hook of it changes gradients"


def _half_word(half: Any) -> str:
    """The dtype that the step `half` asks for."""
    return str((half or {}).get("dtype", "its new dtype"))


def _keep(steps: Mapping[str, Any], name: str) -> str:
    if _half_word(steps.get("half")) == "float16":
        return f"add steps.half.keep=[norms,{name}], or take steps.half.dtype=bfloat16"
    return f"add steps.half.keep=[norms,{name}]"


def _is_last(options: Any) -> bool:
    return str((options or {}).get("memory_format", "channels_last")).startswith("channels_last")
