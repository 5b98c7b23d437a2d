"""The base of rewrites: a convolution computed by another operation that is exactly equal.

A rewritten module has a class named by its rewrite (`LinearConv2d`): a subclass of its original class, with
the same Parameters, which runs torch's own code for calls that the rewrite is not for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.conv import _ConvNd

from prepare.core.model.module_kinds import has_own_sizes
from prepare.core.model.tensors import is_lazy, is_plain
from prepare.steps.repairs import all_repairs
from prepare.steps.repairs.base import is_channels_last, not_a_view, with_channels_last_grad
from prepare.steps.repairs.swap_class import SwapClass


class Rewritten(_ConvNd):
    """A convolution that computes the calls for which its rewrite is, and lets torch compute the others."""

    rewritten_as: ClassVar[str]
    """The name of the rewrite."""
    in_channels_last = False
    """Whether the pipeline requests channels-last of its output, whatever the format of its weight."""
    chosen_for: tuple[Any, ...] = ()
    """The attributes for which the rewrite was chosen: others that are set later are for torch's code."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        result = self.served(input, weight, bias)
        return super()._conv_forward(input, weight, bias) if result is None else result

    def served(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the result of the rewrite; None if the rewrite is not for this call."""
        is_same = (*_sizes(self), self.kernel_size) == (*self.chosen_for, weight.shape[2:])
        if not (is_same and _is_common(x, weight, self.groups) and self._takes(x)):
            return None
        return self._compute(x, weight, bias)

    def _takes(self, x: Tensor) -> bool:
        """Return whether the rewrite is for an input of these sizes. Pure, and cheap."""
        return True

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        raise NotImplementedError

    def _is_last(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether torch's convolution would return channels-last."""
        return self.in_channels_last or is_channels_last(x) or is_channels_last(weight)


class Rewrite(SwapClass):
    """Replace the operation of convolutions of one structure by an exact identity, `phrase`.

    `never_loses` is whether it was never slower in our measurements, for any call that it takes: then it
    needs no example.
    """

    step: ClassVar[str] = "rewrite_conv"
    phrase: ClassVar[str]
    never_loses: ClassVar[bool] = False

    def mismatch(self, module: Any) -> str:
        """Return what of the structure of a convolution this rewrite is not for; empty if it fits."""
        raise NotImplementedError

    def reason(self, module: nn.Module) -> str:
        """Return why this rewrite is not for `module`; empty if it is. Pure."""
        if not self.concerns(module):
            kinds = " or ".join(sorted(kind.__name__ for kind in self.swaps))
            return f"{type(module).__name__} is no {kinds}"
        if not has_own_sizes(module):
            return "a size of it is no tuple, as torch makes them"
        if mismatch := self.mismatch(module):
            return mismatch
        if not (self.is_repaired(module) or super().fits(module)):
            return f"a call of {type(module).__name__} does not run torch's own code"
        weight = module._parameters.get("weight")
        if weight is not None and not (is_lazy(weight) or is_plain(weight)):
            return f"its weight is a {type(weight).__name__}"
        return ""

    def fits(self, module: nn.Module) -> bool:
        return not self.is_repaired(module) and not self.reason(module)

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        with _without_repairs(module):
            super().repair(module, formats)
        conv: Any = module
        vars(module)["chosen_for"] = _sizes(conv)
        if len(conv.kernel_size) + 2 in formats:
            vars(module)["in_channels_last"] = True

    def undo(self, module: nn.Module) -> None:
        with _without_repairs(module):
            super().undo(module)
        vars(module).pop("chosen_for", None)
        vars(module).pop("in_channels_last", None)


@contextmanager
def _without_repairs(module: nn.Module) -> Iterator[None]:
    """Take the repairs of the class off for the block: they lie over a rewrite, as its `super()`."""
    every = all_repairs().values()
    found = [each for each in every if each.swaps and each.is_repaired(module)]
    for repair in found:
        repair.undo(module)
    yield
    for repair in reversed(found):
        repair.repair(module, {})


def _sizes(module: Any) -> tuple[Any, ...]:
    """Return what torch reads in each call of a convolution besides its tensors."""
    return module.stride, module.padding, module.dilation, module.groups, module.padding_mode


def plain_reason(module: Any) -> str:
    """Return what is more than a kernel and a stride: padding, dilation or groups; empty if nothing."""
    if any(_padding(module)):
        return f"padding {module.padding} is not 0"
    if any(
        step != 1
        for size, step in zip(module.kernel_size, module.dilation, strict=True)
        if size > 1
    ):
        return f"dilation {module.dilation} is not 1"
    return "" if module.groups == 1 else f"groups {module.groups} are not 1"


def _padding(module: Any) -> Sequence[int]:
    is_zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return module.padding if is_zeros else module._reversed_padding_repeated_twice


def multiply(module: Rewritten, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a convolution with kernel = stride as a product, in the layout of torch's result.

    `x` and `weight` are read as they lie: the columns are (C, k) for a contiguous weight and (k, C) for a
    channels-last one, which is a view of it. With one output position the rows are a view of the input.
    """
    last, by_channel = module._is_last(x, weight), not is_channels_last(weight)
    if by_channel and is_channels_last(x):
        x = with_channels_last_grad(x)
    number, channels, *sizes = x.shape
    positions = [size // step for size, step in zip(sizes, module.kernel_size, strict=True)]
    pairs = zip(positions, module.kernel_size, strict=True)
    x = x.reshape(number, channels, *(size for pair in pairs for size in pair))
    outer, inner = range(2, x.dim(), 2), range(3, x.dim(), 2)
    order = (1, *inner) if by_channel else (*inner, 1)
    rows = x.permute(0, *outer, *order).flatten(len(sizes) + 1)
    matrix = as_matrix(weight)
    if prod(positions) == 1:
        result = F.linear(rows.flatten(0, -2), matrix, bias)
        ones = [1] * len(sizes)
        shaped = (
            result.view(number, *ones, -1).movedim(-1, 1)
            if last
            else result.view(number, -1, *ones)
        )
        return not_a_view(shaped)
    if last or number > 1:
        result = F.linear(rows, matrix, bias).movedim(-1, 1)
        return not_a_view(result) if last else result.contiguous()
    columns = rows.flatten(0, -2).t()
    result = matrix @ columns if bias is None else torch.addmm(bias[:, None], matrix, columns)
    return not_a_view(result.view(1, -1, *positions))


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as (O, C * k), or as (O, k * C) if it is in channels-last: a view of it."""
    return (weight.movedim(1, -1) if is_channels_last(weight) else weight).flatten(1)


def in_format(x: Tensor, *, last: bool) -> Tensor:
    """Return `x` in channels-last or contiguous, with exact strides for sizes of 1; no view of a result."""
    x = (x.movedim(1, -1) if last else x).contiguous()
    x = x.flatten().view(x.shape)
    return not_a_view(x.movedim(-1, 1) if last else x)


def _is_common(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether a call is one of batches of plain tensors, with sizes that are known."""
    return (
        x.dim() == weight.dim()
        and x.layout is weight.layout is torch.strided
        and all(isinstance(size, int) for size in x.shape[1:])
        and x.shape[1] == weight.shape[1] * groups
        and 0 not in x.shape
        and x.device == weight.device
        and (x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type))
    )
