"""Name the known issues that a call has for certain, by the module and the shape of its input."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from prepare.core.model.forward_code import forward_code, torch_class
from prepare.core.model.issue_sizes import SIZES
from prepare.core.model.known_issues import ONLY, Issue, standing
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_kinds import has_own_sizes
from prepare.core.model.tensors import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


_FORMATS = {4: ("contiguous", "channels_last"), 5: ("contiguous", "channels_last_3d")}


class CallIssues:
    """The known issues with one effect, by default wrong numbers, that a device has at some sizes only."""

    def __init__(self, device: str, effect: str = "wrong") -> None:
        self._by_class: dict[str, list[Issue]] = defaultdict(list)
        for issue in standing(device):
            for operation in issue.operations if issue.sizes and issue.effect == effect else ():
                self._by_class[operation].append(issue)

    def of(self, module: nn.Module, shape: Sequence[int]) -> list[Issue]:
        """Return the issues that a call has for certain, given the shape of the module's input."""
        cls: Any = type(module)  # a class is hashable, which mypy denies
        kind = getattr(torch_class(cls), "__name__", "")
        issues = self._by_class.get(kind)
        if not issues or not has_own_sizes(module):
            return []
        weight = module._parameters.get("weight", vars(module).get("weight"))
        if weight is None:
            return []
        if (code := forward_code(module)).repaired or not code.runs_torchs:
            return []
        formats, dtypes = _formats_of(weight), [name_of(weight.dtype)]
        return [
            issue
            for issue in issues
            if issue.concerns(kind, formats, dtypes)
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
