"""Correct the strides of torch's fake tensors, and say why a forward cannot run on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from prepare.core.forward.explain_error import explained

_VIEWS = ("aten::view", "aten::_unsafe_view")

_NEEDS_VALUE = "needs the value of a tensor, as an if, a loop or .item() over data does"
_NEEDS_SHAPE = "gives a tensor whose shape depends on the data"
_NO_KERNEL = "cannot run without data"
# By the name of the class: torch has moved these around.
_REASONS = {
    "DataDependentOutputException": _NEEDS_VALUE,
    "GuardOnDataDependentSymNode": _NEEDS_VALUE,
    "DynamicOutputShapeException": _NEEDS_SHAPE,
    "UnsupportedOperatorException": _NO_KERNEL,
    "UnsupportedFakeTensorException": _NO_KERNEL,
}


def corrected(name: str, args: tuple, output: Any) -> Any:
    """What the operation called `name` gives, with the strides that it gives to real tensors.

    To view a tensor in the shape it has gives dimensions of size 1 new strides, which a fake tensor
    keeps. They decide what torch's kernels take one sample for (see `is_odd`).
    """
    if name not in _VIEWS or not isinstance(output, FakeTensor) or 1 not in output.shape:
        return output
    true = _view_stride(args[0], output.shape)
    if true == output.stride():
        return output
    return output.as_strided(output.shape, true, output.storage_offset())


def reason_for(model: nn.Module, error: Exception) -> str:
    """One sentence: which module, what it needs, and what to do."""
    problem = explained(model, error).problems[0]
    known = _REASONS.get(type(error).__name__)
    if known is None:
        return f"{problem.where}: {problem.wrong}; observe a real forward instead"
    operation = getattr(error, "func", None) or error
    return f"{problem.where}: {operation} {known}; observe a real forward instead"


def _view_stride(given: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    with _disable_current_modes():
        plain = torch.empty_strided(tuple(given.shape), given.stride(), device="meta")
        return plain.view(tuple(shape)).stride()
