"""Correct the strides of torch's fake tensors, and say why a forward cannot run on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from prepare.core.forward.explain_error import explained

_VIEWS = ("aten::view", "aten::_unsafe_view")
# On a CPU the first output of these has the format of the input, which is the argument at this index.
_IN_FORMAT_OF = {
    "aten::native_group_norm": 0,
    "aten::replication_pad2d": 0,  # in torch 2.5
    "aten::reflection_pad2d": 0,
    "aten::replication_pad3d": 0,
    "aten::reflection_pad3d": 0,
    "aten::replication_pad2d_backward": 1,
    "aten::reflection_pad2d_backward": 1,
    "aten::replication_pad3d_backward": 1,
    "aten::reflection_pad3d_backward": 1,
}

_NEEDS_VALUE = "needs the value of a tensor, as an if, a loop or .item() over data does"
_NEEDS_SHAPE = "gives a tensor whose shape depends on the data"
_NO_KERNEL = "cannot run without data"
# Keyed by the name of the class, since torch has moved these classes between modules.
_REASONS = {
    "DataDependentOutputException": _NEEDS_VALUE,
    "GuardOnDataDependentSymNode": _NEEDS_VALUE,
    "DynamicOutputShapeException": _NEEDS_SHAPE,
    "UnsupportedOperatorException": _NO_KERNEL,
    "UnsupportedFakeTensorException": _NO_KERNEL,
}


def correct_strides(operator_name: str, args: tuple, output: Any) -> Any:
    """Return the output of an operator with the strides that it has for real tensors.

    Viewing a tensor in its own shape gives dimensions of size 1 new strides, but a fake tensor keeps
    the old ones. These strides decide how torch's kernels read one sample (see `has_odd_strides`).
    On a CPU, padding by replication or reflection keeps channels-last, and group norm gives one sample the
    strides of the format.
    """
    if operator_name in _IN_FORMAT_OF:
        source = args[_IN_FORMAT_OF[operator_name]]
        if isinstance(output, tuple):
            return _in_format_of(source, output[0]), *output[1:]
        return _in_format_of(source, output)
    if operator_name not in _VIEWS or not isinstance(output, FakeTensor) or 1 not in output.shape:
        return output
    real_stride = _view_stride(args[0], output.shape)
    if real_stride == output.stride():
        return output
    return output.as_strided(output.shape, real_stride, output.storage_offset())


def _in_format_of(source: Tensor, output: Any) -> Any:
    """Return a fake output on a CPU with exactly the strides of the format of `source`."""
    if not isinstance(output, FakeTensor) or output.device.type != "cpu":
        return output
    memory_format = suggest_memory_format(source)
    with _disable_current_modes():
        shape = tuple(output.shape)
        stride = torch.empty(shape, memory_format=memory_format, device="meta").stride()
    dense = output.contiguous(memory_format=memory_format)
    return dense if dense.stride() == stride else dense.as_strided(shape, stride, 0)


def explain_failure(model: nn.Module, error: Exception) -> str:
    """Explain in one sentence which module cannot be predicted, what it needs, and what to do."""
    problem = explained(model, error).problems[0]
    need = _REASONS.get(type(error).__name__)
    if need is None:
        return f"{problem.where}: {problem.wrong}; observe a real forward instead"
    operation = getattr(error, "func", None) or error
    return f"{problem.where}: {operation} {need}; observe a real forward instead"


def _view_stride(tensor: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    with _disable_current_modes():
        real = torch.empty_strided(tuple(tensor.shape), tensor.stride(), device="meta")
        return real.view(tuple(shape)).stride()
