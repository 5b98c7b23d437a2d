"""Find the known issues that a call has because of its size, for the layout flow and the verification."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from prepare.core.model.doctor_answers import standing_here
from prepare.core.model.issue_sizes import SIZES
from prepare.core.model.known_issues import ONLY, Issue
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.repair_marker import is_repaired
from prepare.core.model.tensors import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

_FORMATS = {4: ("contiguous", "channels_last"), 5: ("contiguous", "channels_last_3d")}


class CallIssues:
    """The known issues of wrong numbers that a type of device has at some sizes only."""

    def __init__(self, device: str) -> None:
        self._by_class: dict[str, list[Issue]] = defaultdict(list)
        for issue in standing_here(device):
            for operation in issue.operations if issue.is_risk else ():
                self._by_class[operation].append(issue)

    def of(self, module: nn.Module, shape: Sequence[int]) -> list[Issue]:
        """Return the issues that a call has for certain, given the shape of the module's input."""
        issues, weight = self._by_class.get(type(module).__name__), getattr(module, "weight", None)
        if not issues or weight is None or is_repaired(module):
            return []
        formats, dtypes = _formats_of(weight), [name_of(weight.dtype)]
        return [
            issue
            for issue in issues
            if issue.concerns(type(module).__name__, formats, dtypes)
            and ONLY[issue.only](module)
            and SIZES[issue.sizes].holds(module, shape)
        ]


def describe(issue: Issue) -> str:
    """Return the sizes and the name of an issue, as the end of a sentence about a module."""
    sizes = SIZES[issue.sizes].what
    return f"wrong on this device {sizes}, as in this call: {issue.what} [{issue.name}]"


def _formats_of(weight: Tensor) -> list[str]:
    """Return the formats that the strides of a weight satisfy; all of them for another rank."""
    names = _FORMATS.get(weight.dim())
    if names is None:
        return ["contiguous", "channels_last", "channels_last_3d"]
    return [name for name in names if canonical_stride(weight.shape, name) == weight.stride()]
