"""The cases of a verification: which mode, how many samples, which mean the inputs have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.verify.inputs import of_size, shifted

if TYPE_CHECKING:
    from prepare.core.forward.call import Call

# CPU group norm loses all digits from here on, where its input lies in channels-last.
LARGE_MEAN = 100.0


@dataclass(frozen=True)
class Case:
    """One call in one mode; `is_variation` if it is not the user's own batch in the user's mode."""

    mode: str
    call: Call
    inputs: str = ""
    is_variation: bool = False


def cases_for(level: str, mode: str, call: Call) -> list[Case]:
    """The cases of a level; of `full`, the user's own first."""
    own = Case(mode, call)
    if level == "short":
        return [own]
    has_floats = any(tensor.is_floating_point() for tensor in call.tensors())
    found = []
    for each in (mode, "train" if mode == "eval" else "eval"):
        for size in (1, 2) if call.batch else (None,):
            sized = call if size is None else of_size(call, size)
            if each != mode or sized is not call:
                found.append(Case(each, sized, is_variation=True))
            if has_floats:
                large = f"mean {LARGE_MEAN:.0f} deviations"
                found.append(Case(each, shifted(sized, LARGE_MEAN), large, is_variation=True))
    return [own, *found]
