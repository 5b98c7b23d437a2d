"""List the cases of a verification: mode, number of samples, and mean of the inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prepare.verify.inputs import resized, shifted

if TYPE_CHECKING:
    from prepare.core.forward.call import Call

# At this mean, in standard deviations, CPU group norm loses all digits of channels-last inputs.
LARGE_MEAN = 100.0


@dataclass(frozen=True)
class VerificationCase:
    """One call in one mode. `is_variation`: not the user's own batch in the user's mode.

    With `outputs_only` no backward runs, and float32 is taken as exact: a cheap first look at the batch.
    """

    mode: str
    call: Call
    inputs: str = ""
    is_variation: bool = False
    outputs_only: bool = False


def affordable(case: VerificationCase) -> list[VerificationCase]:
    """Return the outputs of the whole batch, then one sample with gradients, for a batch that is too slow."""
    return [replace(case, outputs_only=True), replace(case, call=resized(case.call, 1))]


def cases_for(level: str, mode: str, call: Call) -> list[VerificationCase]:
    """Return the cases of a level; the first one is the user's batch in the user's mode."""
    first = VerificationCase(mode, call)
    if level == "short":
        return [first]
    has_floats = any(tensor.is_floating_point() for tensor in call.tensors())
    large_mean = f"mean {LARGE_MEAN:.0f} deviations"
    variations = []
    for case_mode in (mode, "train" if mode == "eval" else "eval"):
        for size in (1, 2) if call.batch else (None,):
            sized = call if size is None else resized(call, size)
            if case_mode != mode or sized is not call:
                variations.append(VerificationCase(case_mode, sized, is_variation=True))
            if has_floats:
                large = shifted(sized, LARGE_MEAN)
                case = VerificationCase(case_mode, large, large_mean, is_variation=True)
                variations.append(case)
    return [first, *variations]
