"""Find a call that fails by itself, and make it simpler while it still fails in the same way."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from prepare.core.model.known_issues import ONLY, standing
from prepare.core.utils.child_process import HANGS as HUNG
from prepare.core.utils.child_process import Worker
from prepare.reduce.records import CRASHES, FAULTS, HANGS, SLOW, WRONG, ModuleCall, Reduction
from prepare.reduce.script import script_of
from prepare.reduce.shrink import variants
from prepare.reduce.worker import INVALID, answer, run_script

# Seconds of one script.
_SECONDS = 10.0
_REPEATS = 20
# A variant whose error is smaller than that of the first call by more than this factor has another fault.
_SMALLER = 5.0
Trial = Callable[[ModuleCall], tuple[str, str]]


class WorkerTrials(Worker):
    """Run scripts in a child process, so that one that crashes or hangs ends no other."""

    def __init__(self) -> None:
        super().__init__(f"{answer.__module__}:{answer.__name__}")
        self._is_spoiled = False

    def __call__(self, call: ModuleCall) -> tuple[str, str]:
        """Return the outcome of a call, and what its script said."""
        request = {"script": script_of(call), "dtype": call.dtype, "allowed": call.limit}
        fresh = call.slow or self._is_spoiled
        found, death = self.ask(request, seconds=_SECONDS, fresh=fresh)
        outcome, text = found or (HANGS if death == HUNG else CRASHES, f"its process {death}")
        self._is_spoiled = outcome in FAULTS  # its memory may be overwritten
        return outcome, text


def trial_here(call: ModuleCall) -> tuple[str, str]:
    """Run the script of a call in this process."""
    return run_script(script_of(call), dtype=call.dtype, allowed=call.limit)


def reduce_calls(
    calls: Iterable[ModuleCall],
    trial: Trial,
    *,
    seconds: float,
    environment: dict[str, Any] | None = None,
) -> Reduction | None:
    """Return the reduction of the first call that fails; None if none fails, or no time is left."""
    began, trials = time.perf_counter(), 0
    for first in calls:
        fault = ""
        for call in _first_tries(first):
            if call.limit > first.limit and fault != INVALID:
                continue  # only if rounding might explain the error
            trials += 1
            fault, text = trial(call)
            if fault in FAULTS:
                best, text, more = _shrunk(call, fault, text, trial, began + seconds)
                return Reduction(
                    fault=fault,
                    module=best.name,
                    call=best,
                    script=script_of(best),
                    text=text,
                    known=known_twin(best, fault),
                    trials=trials + more,
                    seconds=round(time.perf_counter() - began, 3),
                    environment=environment or {},
                )
            if time.perf_counter() - began > seconds:
                return None
    return None


def _first_tries(call: ModuleCall) -> Iterable[ModuleCall]:
    """Yield a call, then with larger and smaller errors allowed, then repeated."""
    yield call
    if call.slow:
        return
    for factor in (10, 100):
        yield replace(call, allowed=call.limit * factor)
    if call.dtype == "float32":
        yield replace(call, allowed=call.limit / 10)
    yield replace(call, repeats=_REPEATS)


def _shrunk(
    call: ModuleCall, fault: str, text: str, trial: Trial, end: float
) -> tuple[ModuleCall, str, int]:
    """Take any simpler variant that fails in the same way, until there is none.

    A fault of the memory format stays one: each variant must be right in the contiguous format.
    """
    tried, trials = {call}, 1
    of_format = not call.slow and call.format != "contiguous"
    of_format = of_format and trial(replace(call, format="contiguous"))[0] not in FAULTS
    least = _error(text) / _SMALLER
    progress = True
    while progress:
        progress = False
        for variant in variants(call):
            if variant in tried or variant.size >= call.size and not _is_plainer(variant, call):
                continue
            if of_format and variant.format == "contiguous":
                continue
            if time.perf_counter() > end:
                return call, text, trials
            tried.add(variant)
            trials += 1
            found, said = trial(variant)
            if found == fault and _error(said) < least:
                continue  # another, smaller error, as of rounding
            if found == fault and of_format:
                trials += 1
                found = (
                    fault if trial(replace(variant, format="contiguous"))[0] not in FAULTS else ""
                )
            if found == fault:
                call, text, progress = variant, said, True
                break
    return call, text, trials


def _error(text: str) -> float:
    """Parse the error that a script printed, capped at 1; 1 if there is none, or it is not finite."""
    found = re.search(r"error (\S+),", text)
    error = float(found[1]) if found else 1.0
    return min(error, 1.0) if math.isfinite(error) else 1.0


def _is_plainer(variant: ModuleCall, call: ModuleCall) -> bool:
    values = [each.mean == 0 and each.deviation == 1 for each in (variant, call)]
    return values > values[::-1] or (variant.allowed is None and call.allowed is not None)


def known_twin(call: ModuleCall, fault: str) -> str:
    """Return the name of a known issue of this operation, format and dtype; empty if none is known."""
    from torch import nn

    module = getattr(nn, call.kind)(**dict(call.arguments + call.options))
    for issue in standing(call.device):
        if (
            issue.effect == ("slow" if fault == SLOW else WRONG)
            and issue.concerns(call.kind, [call.format], [call.dtype])
            and ONLY[issue.only](module)
        ):
            return issue.name
    return ""
