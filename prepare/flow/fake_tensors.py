"""Puts right what torch's fake tensors get wrong about strides."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_VIEWS = ("aten::view", "aten::_unsafe_view")


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


def _view_stride(given: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    with _disable_current_modes():
        plain = torch.empty_strided(tuple(given.shape), given.stride(), device="meta")
        return plain.view(tuple(shape)).stride()
