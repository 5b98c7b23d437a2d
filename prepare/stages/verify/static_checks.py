"""Checks that need no forward: values of both models, losses in casts, training flags, and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.core.model.tensors import (
    is_plain,
    name_of,
    named_modules,
    named_tensors,
    stored_values,
)
from prepare.core.model.training_mode import may_read_mode
from prepare.stages.verify.records import Check, Lost
from prepare.step import ModuleStep, Step
from prepare.steps.repairs import find_repair, repair_names

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

TensorPairs = dict[str, tuple[Tensor, Tensor]]


def tensor_pairs(reference: nn.Module, prepared: nn.Module) -> TensorPairs:
    """Return (reference's, prepared) for each tensor that both models have under the same name."""
    originals = {entry.path: entry.tensor for entry in named_tensors(reference)}
    return {
        entry.path: (originals[entry.path], entry.tensor)
        for entry in named_tensors(prepared)
        if entry.path in originals
    }


def static_checks(
    reference: nn.Module, prepared: nn.Module, pairs: TensorPairs, pipeline: Pipeline | None
) -> tuple[list[Check], tuple[Lost, ...], tuple[str, ...]]:
    """Return all checks, the losses of casts, and the modules whose tensors a structure step replaced."""
    rewritten, mode_changed = rewritten_modules(reference, prepared, pipeline)
    losses = cast_losses(pairs)
    checks = [
        check_values(reference, prepared, pairs, rewritten),
        check_casts(losses),
        check_flags(reference, prepared, mode_changed),
    ]
    checks += [] if pipeline is None else [check_layout(prepared, pipeline)]
    return checks, losses, rewritten


def rewritten_modules(
    reference: nn.Module, prepared: nn.Module, pipeline: Pipeline | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules whose tensors a structure step replaces, and those whose mode it may change.

    The repairs of `repair_layout` do neither.
    """
    if pipeline is None:
        return (), ()
    repairs = [find_repair(name) for name in repair_names()]
    modules = dict(named_modules(prepared))
    actions = pipeline.plan(reference, known_issues="ignore").actions
    targets = [(n, a.step) for a in actions if a.phase == "structure" for n in a.modules]
    rewritten = tuple(n for n, step in targets if not _keeps_tensors(pipeline.steps[step]))
    mode_changed = tuple(
        n
        for n, _ in targets
        if n not in modules or not any(repair.is_repaired(modules[n]) for repair in repairs)
    )
    return rewritten, mode_changed


def check_values(
    reference: nn.Module, prepared: nn.Module, pairs: TensorPairs, rewritten: tuple[str, ...]
) -> Check:
    """Check that every tensor equals the reference's, cast to its dtype, bit for bit.

    A number beyond the range of the dtype may be clamped; that it became infinite is found by `check_casts`.
    """
    paths = {entry.path for model in (reference, prepared) for entry in named_tensors(model)}
    different = [
        path
        for path in sorted(paths)
        if not is_under(path, rewritten) and not _is_equal(pairs.get(path))
    ]
    if not different:
        return Check(what="values", status="pass", compared=len(pairs))
    worst = different[0]
    more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
    if worst in pairs:
        note = f"{worst}{more} differs from the reference's values, cast to its dtype"
    else:
        note = f"{worst}{more} is in only one of the two models"
    return Check(what="values", status="fail", worst=worst, compared=len(paths), note=note)


def cast_losses(pairs: TensorPairs) -> tuple[Lost, ...]:
    """Return the losses of every tensor that lost numbers in a cast, the worst first."""
    losses = [loss for path, pair in pairs.items() if (loss := _cast_loss(path, *pair))]
    return tuple(sorted(losses, key=lambda x: (-x.overflowed, -x.rounded, -x.flushed, x.tensor)))


def check_casts(losses: tuple[Lost, ...]) -> Check:
    """Fail if a finite number became infinite; other losses are recorded only."""
    overflows = [loss for loss in losses if loss.overflowed]
    if not overflows:
        return Check(what="casts", status="pass", compared=len(losses))
    worst = overflows[0]
    note = (
        f"{worst.overflowed} of {worst.elements} numbers of {worst.tensor} overflow {worst.after}"
    )
    return Check(what="casts", status="fail", worst=worst.tensor, compared=len(losses), note=note)


def check_layout(prepared: nn.Module, pipeline: Pipeline) -> Check:
    """Check that every tensor still has the device, dtype and layout that the pipeline wants."""
    drift = pipeline.check(prepared)
    if not drift:
        return Check(what="layout", status="pass")
    more = f" (and {len(drift) - 1} more)" if len(drift) > 1 else ""
    return Check(what="layout", status="fail", worst=drift[0].where, note=f"{drift[0]}{more}")


def check_flags(reference: nn.Module, prepared: nn.Module, mode_changed: tuple[str, ...]) -> Check:
    """Check that the same modules are in training mode, if both models themselves are in the same mode.

    A module whose code never reads a mode may differ: some classes come back from `copy.deepcopy` in
    training mode.
    """
    if reference.training != prepared.training:
        return Check(
            what="flags", status="skipped", note="one model is in training mode, the other is not"
        )
    flags = {name: module.training for name, module in named_modules(reference)}
    prepared_modules = dict(named_modules(prepared))
    for name, module in prepared_modules.items():
        expected = flags.get(name, module.training)
        if expected == module.training or is_under(name, mode_changed):
            continue
        if may_read_mode(prepared_modules, name):
            mode = "train" if module.training else "eval"
            note = f"{name} is in {mode} mode, but not in the reference"
            return Check(what="flags", status="fail", worst=name, compared=len(flags), note=note)
    return Check(what="flags", status="pass", compared=len(flags))


def _keeps_tensors(step: Step) -> bool:
    return isinstance(step, ModuleStep) and step.keeps_tensors


def is_under(path: str, modules: tuple[str, ...]) -> bool:
    return any(not name or path == name or path.startswith(name + ".") for name in modules)


def _is_equal(pair: tuple[Tensor, Tensor] | None) -> bool:
    if pair is None:
        return False
    reference, prepared = (tensor.detach() for tensor in pair)
    if not (is_plain(pair[0]) and is_plain(pair[1])):
        return True  # only its class knows the values of such a tensor; the outputs are compared
    if reference.shape != prepared.shape or reference.is_complex() != prepared.is_complex():
        return False
    cast = reference.to(prepared.device, prepared.dtype)
    both_nan = (cast != cast) & (prepared != prepared)  # noqa: PLR0124
    equal = (cast == prepared) | both_nan
    if cast.is_floating_point() and not equal.all():
        largest = torch.finfo(cast.dtype).max
        is_clamped = cast.isinf() & reference.isfinite().to(cast.device)
        equal |= is_clamped & (prepared == cast.clamp(-largest, largest))
    return bool(equal.all())


def _cast_loss(path: str, before: Tensor, after: Tensor) -> Lost | None:
    if before.layout is after.layout is not torch.strided:
        before, after = stored_values(before), stored_values(after)
    is_comparable = is_plain(before) and is_plain(after) and before.shape == after.shape
    if not is_comparable or before.dtype == after.dtype or not before.is_floating_point():
        return None
    before, after = before.detach(), after.detach().to(before.device)
    is_whole = before.numel() > 1 and bool((before == before.round()).all())
    loss = Lost(
        tensor=path,
        before=name_of(before.dtype),
        after=name_of(after.dtype),
        elements=before.numel(),
        overflowed=int((before.isfinite() & ~after.isfinite()).sum()),
        flushed=int(((before != 0) & (after == 0)).sum()),
        rounded=int((before != after.to(before.dtype)).sum()) if is_whole else 0,
    )
    return loss if loss.overflowed or loss.flushed or loss.rounded else None
