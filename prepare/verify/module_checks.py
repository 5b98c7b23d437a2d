"""Decide whether modules are compared alone, and turn the comparison into checks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from prepare.core.utils.text import plural
from prepare.verify.compare_modules import MODULE_FIELDS, ModuleDifferences, compare_modules
from prepare.verify.execution.runner import CannotTellError, PreparedModelError
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
    if _lacks_float64(comparison) or comparison.models.quantized:
        return True
    if any(check.status == "fail" for check in checks):
        return False
    return comparison.mode == case.mode == "train" and _is_blind(comparison, checks)


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
    """Turn failures of the whole model's gradients into `cannot tell` where only rounding may be the cause.

    Without float64 the error of the exact run is not known. If every module alone is right in float64 and the
    difference is not garbage, it may be amplified rounding.
    """
    counted = [check for check in alone if check.status in ("pass", "fail", "wrong")]
    is_right = len(counted) == len(MODULE_FIELDS) and all(
        check.status == "pass" and not check.note for check in counted
    )
    if not is_right or not _lacks_float64(comparison):
        return checks
    return [_without_proof(comparison, check) for check in checks]


def _without_proof(comparison: CaseComparison, check: Check) -> Check:
    exceeding = comparison.exceeding(check.what) if "gradients" in check.what else []
    if not exceeding or any(item.is_beyond_noise or item.note for item in exceeding):
        return check
    # No longer a difference, so the search for the first wrong module does not stop here.
    kept = [item for item in comparison.differences[check.what] if not item.exceeds]
    comparison.differences[check.what] = kept
    note = "may be amplified rounding: each module alone is right, and float64 does not fit"
    return replace(check, status="cannot tell", note=note)


def _lacks_float64(comparison: CaseComparison) -> bool:
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
