"""Decide whether modules are compared alone, and turn the comparison into checks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from prepare.core.utils.text import plural
from prepare.verify.compare_modules import MODULE_FIELDS, ModuleDifferences, compare_modules
from prepare.verify.execution.runner import CannotTellError, PreparedModelError
from prepare.verify.records import ALL_ZERO
from prepare.verify.tolerance import sensitivity

if TYPE_CHECKING:
    from prepare.verify.compare_case import CaseComparison
    from prepare.verify.records import Check

# Modules are compared alone if the whole model's gradients would hide systematic errors of this fraction.
SHARP = 0.001


def module_checks(comparison: CaseComparison, checks: list[Check]) -> list[Check]:
    """Compare all modules alone if the `checks` of the whole model hide errors; return further checks."""
    if not _are_needed(comparison, checks):
        return []
    runner, backward = comparison.runner, _has_gradients(checks)
    kinds = [kind for kind in MODULE_FIELDS if backward or kind == "module outputs"]
    try:
        found = compare_modules(runner, comparison.case.call, backward=backward)
    except (CannotTellError, PreparedModelError) as reason:
        note = f"not compared: {reason}"
        return [comparison.check(kind, "skipped", note=note) for kind in kinds]
    comparison.differences |= found.deviations
    comparison.alone = found
    return [_judge(comparison, kind, found, checks) for kind in kinds]


def _are_needed(comparison: CaseComparison, checks: list[Check]) -> bool:
    case = comparison.case
    if comparison.compiled or case.is_variation or case.outputs_only:
        return False
    if comparison.models.amp != "none":  # each module would need the casts of the code around it
        return False
    if any(check.status == "fail" and check.what == "outputs" for check in checks):
        return False
    # The tolerance of the whole model is that of 8 bits; a module with the same weights computes exactly.
    if lacks_float64(comparison) or comparison.models.quantized:
        return True
    if any(check.note == ALL_ZERO for check in checks):
        return True
    if not comparison.mode == case.mode == "train":
        return False
    failed = [check.what for check in checks if check.status == "fail"]
    if failed:
        return all(may_be_rounding(comparison, what) for what in failed)
    return _is_blind(comparison, checks)


def _is_blind(comparison: CaseComparison, checks: list[Check]) -> bool:
    """Return True if the whole model hides an error of `SHARP` in the gradients of a module."""
    gradients = [check for check in checks if "gradients" in check.what]
    if not _has_gradients(checks) or any(check.status != "pass" for check in gradients):
        return _has_gradients(checks)
    # Also modules with small gradients, as those behind a layer scale of 1e-6.
    found = comparison.differences["parameter gradients"]
    seen, _ = sensitivity(found, by_module=True, negligible=0.0)
    return seen > SHARP or any((check.sensitivity or 0.0) > SHARP for check in gradients)


def without_proof(
    comparison: CaseComparison, checks: list[Check], alone: list[Check]
) -> list[Check]:
    """Turn failures of the whole model's gradients where only rounding may be the cause.

    If every module alone is right in float64, and the whole model's gradients are those of its modules, the
    model amplifies rounding, and that is not a failure. Else it is `cannot tell` if some modules had no
    gradients in the whole model, or without float64, where the error of the exact run is not known.
    """
    if len(alone) != len(MODULE_FIELDS) or not all(map(_is_right, alone)):
        return checks
    is_sum = comparison.alone.is_sum if comparison.alone else None
    if is_sum is False and not lacks_float64(comparison):
        return checks
    status = "pass" if is_sum else "cannot tell"
    seen = max(check.sensitivity or 0.0 for check in alone)
    return [_without_proof(comparison, check, status, seen) for check in checks]


def without_outputs(
    comparison: CaseComparison, checks: list[Check], alone: list[Check]
) -> list[Check]:
    """Skip outputs that are all zero if every module alone is right, and some have other outputs."""
    has_numbers = any(item.allowed for item in comparison.differences.get("module outputs", []))
    if not has_numbers or not all(map(_is_right, alone)):
        return checks
    note = f"{ALL_ZERO}; each module alone is right"
    return [
        replace(check, status="skipped", note=note) if check.note == ALL_ZERO else check
        for check in checks
    ]


def _is_right(check: Check) -> bool:
    return check.status == "pass" and not check.note


def _without_proof(comparison: CaseComparison, check: Check, status: str, seen: float) -> Check:
    exceeding = comparison.exceeding(check.what)
    if not exceeding or not may_be_rounding(comparison, check.what):
        return check
    if all(item.error <= seen for item in exceeding):  # the modules alone would not show it
        return check
    # No longer a difference, so the search for the first wrong module does not stop here.
    kept = [item for item in comparison.differences[check.what] if not item.exceeds]
    comparison.differences[check.what] = kept
    if status == "pass":
        note = f"{check.worst} amplifies rounding: each module alone is right"
        return replace(check, status=status, note=note, error=None, allowed=None)
    reason = "float64 does not fit" if lacks_float64(comparison) else "some modules get no gradient"
    note = f"may be amplified rounding: each module alone is right, and {reason}"
    return replace(check, status=status, note=note)


def may_be_rounding(comparison: CaseComparison, kind: str) -> bool:
    """Return True if all that exceeds its tolerance are gradients, and by no more than noise may explain."""
    exceeding = comparison.exceeding(kind)
    return "gradients" in kind and not any(item.is_beyond_noise or item.note for item in exceeding)


def lacks_float64(comparison: CaseComparison) -> bool:
    """Return True if the exact run was in float32, since float64 does not fit."""
    return comparison.exact_dtype == torch.float32 and not comparison.runner.exact_raised


def _has_gradients(checks: list[Check]) -> bool:
    return any(check.what == "parameter gradients" and check.compared for check in checks)


def _judge(
    comparison: CaseComparison, kind: str, found: ModuleDifferences, checks: list[Check]
) -> Check:
    deviations = found.deviations.get(kind, [])
    if not deviations:
        return comparison.check(kind, "skipped", note=_left_out(found) or "nothing to compare")
    exceeding = comparison.exceeding(kind)
    counts = kind == "module outputs" or comparison.mode == "train"
    status = "pass" if not exceeding else ("fail" if counts else "wrong")
    worst = max(deviations, key=lambda item: item.excess)
    finds, place = found.sensitivities.get(kind, (None, ""))
    if found.left_out:
        # An error in one of these is found in the whole model only.
        whole = [c.sensitivity or 0.0 for c in checks if kind.partition(" ")[2] in c.what]
        finds, place = max((finds or 0.0, place), (max(whole), next(iter(found.left_out))))
    return comparison.check(
        kind,
        status,
        note=worst.note if exceeding else _left_out(found),
        worst=worst.name,
        compared=len(found.compared),
        error=worst.error if math.isfinite(worst.error) else None,
        allowed=worst.allowed,
        sensitivity=finds,
        least_sensitive=place,
    )


def _left_out(found: ModuleDifferences) -> str:
    if not found.left_out:
        return ""
    name, reason = next(iter(found.left_out.items()))
    count = plural(len(found.left_out), "module")
    return f"{count} not compared alone, first {name or 'the model itself'}: {reason}"
