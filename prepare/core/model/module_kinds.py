"""Recognise modules: convolutions, and our repairs, which keep the layout and compute what torch's do."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
# Convolutions with a weight of 4 or 5 dimensions: only these have a channels-last format.
CONVOLUTIONS_2D_3D = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


_Class = TypeVar("_Class", bound=type)
_MARK = "_prepare_repair"
# Where the classes of repairs, and of rewritten convolutions, are defined.
REPAIRS = ("prepare.steps.repairs.",)


def mark_repair(cls: _Class) -> _Class:
    """Mark `cls` as a repair: a class decorator. Subclasses are not marked."""
    setattr(cls, _MARK, cls)
    return cls


def is_repair(cls: type) -> bool:
    """Return whether `cls` itself was marked with `mark_repair`."""
    return vars(cls).get(_MARK) is cls


def reads_contiguous(module: nn.Module) -> bool:
    """Return whether a rewritten convolution reads a contiguous weight, whatever format is requested."""
    return getattr(module, "_reads_contiguous", False) is True


def is_rewritten(module: nn.Module) -> bool:
    """Return whether the step rewrite_conv has given a convolution another operation."""
    return bool(getattr(type(module), "rewritten_as", ""))


def operation_of(module: nn.Module) -> str:
    """Return what a convolution runs as: `conv3d`, or the name of its rewrite, as `linear`."""
    if is_rewritten(module):
        return str(type(module).rewritten_as)  # type: ignore[attr-defined]
    kind = next(kind for kind in CONVOLUTIONS if isinstance(module, kind))
    return kind.__name__.replace("ConvTranspose", "conv_transpose").lower()
