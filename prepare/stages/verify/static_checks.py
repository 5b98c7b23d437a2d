"""Checks that need no forward: values of both models, training flags, and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.model.forward_code import may_read_mode
from prepare.core.model.tensors import (
    is_plain,
    named_modules,
    named_tensors,
)
from prepare.stages.verify.records import Check
from prepare.steps.conv_memory_format import SwapsClasses

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

TensorPairs = dict[str, tuple[Tensor, Tensor]]


def tensor_pairs(reference: nn.Module, prepared: nn.Module) -> TensorPairs:
    """Return (reference's, prepared) for each tensor that both models have under the same name."""
    originals = {entry.path: entry.tensor for entry in named_tensors(reference)}
    others = {entry.path: entry.tensor for entry in named_tensors(prepared)}
    return {path: (originals[path], new) for path, new in others.items() if path in originals}


def static_checks(
    reference: nn.Module, prepared: nn.Module, pairs: TensorPairs, pipeline: Pipeline | None
) -> tuple[list[Check], tuple[str, ...]]:
    """Return the checks, and the modules whose tensors a structure step replaced."""
    rewritten, mode_changed = list[str](), list[str]()
    for action in pipeline.plan(reference, known_issues="ignore").actions if pipeline else ():
        if pipeline is not None and action.phase == "structure":
            step = pipeline.steps[action.step]
            rewritten += [] if getattr(step, "keeps_tensors", False) else action.modules
            mode_changed += [] if isinstance(step, SwapsClasses) else action.modules
    checks = [
        _check_values(reference, prepared, pairs, tuple(rewritten)),
        _check_flags(reference, prepared, tuple(mode_changed)),
    ]
    if pipeline is not None:
        drift = [(each.where, str(each)) for each in pipeline.check(prepared)]
        where, note = drift[0] if drift else ("", "")
        note += f"{_more(drift)}; apply the pipeline again" if drift else ""
        checks.append(_checked("layout", where, note))
    return checks, tuple(rewritten)


def _checked(what: str, worst: str = "", note: str = "", compared: int = 0) -> Check:
    """Return a check that fails if it has a note."""
    status = "fail" if note else "pass"
    return Check(what=what, status=status, worst=worst, note=note, compared=compared)


def _more(found: Sequence[Any]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def is_under(path: str, modules: tuple[str, ...]) -> bool:
    """Return whether a path is that of one of these modules, or lies in it."""
    return any(not name or path == name or path.startswith(name + ".") for name in modules)


def _check_values(
    reference: nn.Module, prepared: nn.Module, pairs: TensorPairs, rewritten: tuple[str, ...]
) -> Check:
    """Check that every tensor equals the reference's, cast to its dtype, bit for bit.

    A number beyond the range of the dtype may be clamped, and must not be infinite.
    """
    paths = {entry.path for model in (reference, prepared) for entry in named_tensors(model)}
    own = [path for path in sorted(paths) if not is_under(path, rewritten)]
    different = [path for path in own if path not in pairs or not _is_equal(*pairs[path])]
    if not different:
        return _checked("values", compared=len(pairs))
    worst, note = different[0], "differs from the reference's values, cast to its dtype"
    note = note if worst in pairs else "is in only one of the two models"
    remedy = "take copy.deepcopy(model) just before apply, as reference"
    return _checked("values", worst, f"{worst}{_more(different)} {note}; {remedy}", len(paths))


def _check_flags(reference: nn.Module, prepared: nn.Module, mode_changed: tuple[str, ...]) -> Check:
    """Check that the same modules are in training mode, if both models themselves are in the same mode.

    A step may change the mode of modules, but no change of a class does. A module whose code never reads a
    mode may differ: some classes come back from `copy.deepcopy` in training mode.
    """
    if reference.training != prepared.training:
        note = "one model is in training mode, the other is not"
        return Check(what="flags", status="skipped", note=note)
    flags = {name: module.training for name, module in named_modules(reference)}
    for name, module in named_modules(prepared):
        is_same = flags.get(name, module.training) == module.training
        if not is_same and not is_under(name, mode_changed) and may_read_mode(module):
            mode = "train" if module.training else "eval"
            note = f"{name} is in {mode} mode, but not in the reference; set both to the same mode"
            return _checked("flags", name, note, len(flags))
    return _checked("flags", compared=len(flags))


def _is_equal(reference: Tensor, prepared: Tensor) -> bool:
    if not (is_plain(reference) and is_plain(prepared)):
        return True  # only its class knows the values of such a tensor; the outputs are compared
    if reference.shape != prepared.shape or reference.is_complex() != prepared.is_complex():
        return False
    reference, prepared = reference.detach(), prepared.detach()
    cast = reference.to(prepared.device, prepared.dtype)
    if cast.is_floating_point() and cast.dtype != reference.dtype:
        largest = torch.finfo(cast.dtype).max
        is_infinite = reference.isinf().to(cast.device)
        cast = torch.where(is_infinite, cast, cast.clamp(-largest, largest))
    if torch.equal(cast, prepared):
        return True
    equal = (cast == prepared) | ((cast != cast) & (prepared != prepared))  # noqa: PLR0124  NaN
    return bool(equal.all())
