"""Checks that need no forward: values of both models, losses in casts, training flags, and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.core.model.forward_code import may_read_mode
from prepare.core.model.tensors import (
    is_plain,
    name_of,
    named_modules,
    named_tensors,
    stored_values,
)
from prepare.stages.verify.records import Check
from prepare.steps.repairs import all_repairs

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
            keeps = getattr(pipeline.steps[action.step], "keeps_tensors", False)
            rewritten += [] if keeps else action.modules
            mode_changed += action.modules
    checks = [
        _check_values(reference, prepared, pairs, tuple(rewritten)),
        _check_casts(pairs),
        _check_flags(reference, prepared, tuple(mode_changed)),
    ]
    if pipeline is not None:
        drift = pipeline.check(prepared)
        note = _with_more(str(drift[0]), len(drift)) if drift else ""
        worst = drift[0].where if drift else ""
        checks.append(
            Check(what="layout", status="fail" if drift else "pass", worst=worst, note=note)
        )
    return checks, tuple(rewritten)


def is_under(path: str, modules: tuple[str, ...]) -> bool:
    """Return whether a path is that of one of these modules, or lies in it."""
    return any(not name or path == name or path.startswith(name + ".") for name in modules)


def _check_values(
    reference: nn.Module, prepared: nn.Module, pairs: TensorPairs, rewritten: tuple[str, ...]
) -> Check:
    """Check that every tensor equals the reference's, cast to its dtype, bit for bit.

    A number beyond the range of the dtype may be clamped; that it became infinite is found by `_check_casts`.
    """
    paths = sorted(
        {entry.path for model in (reference, prepared) for entry in named_tensors(model)}
    )
    own = [path for path in paths if not is_under(path, rewritten)]
    different = [path for path in own if path not in pairs or not _is_equal(*pairs[path])]
    if not different:
        return Check(what="values", status="pass", compared=len(pairs))
    worst, note = different[0], "is in only one of the two models"
    if worst in pairs:
        note = "differs from the reference's values, cast to its dtype"
    note = f"{_with_more(worst, len(different))} {note}"
    return Check(what="values", status="fail", worst=worst, compared=len(paths), note=note)


def _with_more(text: str, count: int) -> str:
    return f"{text} (and {count - 1} more)" if count > 1 else text


def _check_casts(pairs: TensorPairs) -> Check:
    """Fail if a finite number became infinite; say whether one became 0, or another whole number."""
    effects = "overflow", "are whole and were rounded to", "became 0 in"
    found = [
        (effect, -count, path)
        for path, pair in pairs.items()
        for effect, count in enumerate(_losses(*pair))
        if count
    ]
    if not found:
        return Check(what="casts", status="pass")
    effect, count, path = min(found)
    tensor, status = pairs[path][1], "pass" if effect else "fail"
    note = f"{-count} of {tensor.numel()} numbers of {path} {effects[effect]} "
    note += name_of(tensor.dtype)
    return Check(what="casts", status=status, worst=path, compared=len(found), note=note)


def _losses(before: Tensor, after: Tensor) -> tuple[int, ...]:
    """Count the numbers that became infinite, another whole number, and zero."""
    if before.layout is after.layout is not torch.strided:
        before, after = stored_values(before), stored_values(after)
    is_comparable = is_plain(before) and is_plain(after) and before.shape == after.shape
    if not is_comparable or before.dtype == after.dtype or not before.is_floating_point():
        return ()
    before, after = before.detach(), after.detach().to(before.device)
    is_whole = before.numel() > 1 and bool((before == before.round()).all())
    overflowed = before.isfinite() & ~after.isfinite()
    rounded = (before != after.to(before.dtype)) & is_whole
    return int(overflowed.sum()), int(rounded.sum()), int(((before != 0) & (after == 0)).sum())


def _check_flags(reference: nn.Module, prepared: nn.Module, mode_changed: tuple[str, ...]) -> Check:
    """Check that the same modules are in training mode, if both models themselves are in the same mode.

    A step may change the mode of modules that it does not repair, and a module whose code never reads a mode
    may differ: some classes come back from `copy.deepcopy` in training mode.
    """
    if reference.training != prepared.training:
        note = "one model is in training mode, the other is not"
        return Check(what="flags", status="skipped", note=note)
    flags = {name: module.training for name, module in named_modules(reference)}
    modules, repairs = dict(named_modules(prepared)), all_repairs().values()
    for name, module in modules.items():
        if flags.get(name, module.training) == module.training:
            continue
        is_repaired = any(repair.is_repaired(module) for repair in repairs)
        may_differ = not is_repaired and is_under(name, mode_changed)
        if not may_differ and may_read_mode(module):
            mode = "train" if module.training else "eval"
            note = f"{name} is in {mode} mode, but not in the reference"
            return Check(what="flags", status="fail", worst=name, compared=len(flags), note=note)
    return Check(what="flags", status="pass", compared=len(flags))


def _is_equal(reference: Tensor, prepared: Tensor) -> bool:
    if not (is_plain(reference) and is_plain(prepared)):
        return True  # only its class knows the values of such a tensor; the outputs are compared
    if reference.shape != prepared.shape or reference.is_complex() != prepared.is_complex():
        return False
    reference, prepared = reference.detach(), prepared.detach()
    cast = reference.to(prepared.device, prepared.dtype)
    if torch.equal(cast, prepared):
        return True
    equal = (cast == prepared) | ((cast != cast) & (prepared != prepared))  # noqa: PLR0124  NaN
    if cast.is_floating_point() and not equal.all():
        largest = torch.finfo(cast.dtype).max
        is_clamped = cast.isinf() & reference.isfinite().to(cast.device)
        equal |= is_clamped & (prepared == cast.clamp(-largest, largest))
    return bool(equal.all())
