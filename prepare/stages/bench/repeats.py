"""Compare the outputs of the calls that a bench makes with the same input: they should be the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prepare.core.forward.call import tensors_in
from prepare.core.model.tensors import is_plain
from prepare.core.utils.text import plural

# The most bytes of all outputs that are kept, and of one output that is kept while a call is timed.
_MOST, _SMALL = 2**26, 2**18
# How surely the baseline would have shown differences if it differed as often as the variant.
_SURE = 0.99


class Repeats:
    """The outputs of a variant: `compared` calls after the first of each input, `differing` among them.

    `off` is the largest difference, as a part of the largest number of the first output. Rounding is none:
    the root of the precision of the output's dtype.
    """

    def __init__(self) -> None:
        self.compared, self.differing, self.off = 0, 0, 0.0
        self._first: dict[int, tuple[Any, list[Tensor]]] = {}
        self._bytes = 0

    @torch.no_grad()
    def compare(self, batch: Any, output: Any) -> None:
        """Compare an output for `batch` with the first one for the same object."""
        outputs = _plain(output)
        _, first = self._first.get(id(batch), (None, None))
        if first is None:
            self._bytes += _bytes(outputs)
            if self._bytes <= _MOST:
                self._first[id(batch)] = batch, [tensor.clone() for tensor in outputs]
            return
        self.compared += 1
        off = float("inf")
        if [each.shape for each in outputs] == [each.shape for each in first]:
            off = max(map(_off, outputs, first), default=0.0)
        self.differing += off > 0
        self.off = max(self.off, off)

    def exceeds(self, other: Repeats) -> bool:
        """Return whether these differ, and the others do not and would if they were alike."""
        if not self.differing or other.differing:
            return False
        return (1 - self.differing / self.compared) ** other.compared <= 1 - _SURE

    def __str__(self) -> str:
        off = f", by up to {self.off:.2g} of the largest" if self.off < float("inf") else ""
        return f"{self.brief()} with the same input returned other values{off}"

    def brief(self) -> str:
        """Return how many calls differed."""
        return f"{self.differing} of {plural(self.compared, 'call')}"


def kept(output: Any) -> list[Tensor] | None:
    """Return the tensors of an output, if to keep them does not change where the next call finds memory.

    Not those on an accelerator: a graph of calls may write into them again, and refuse that they are read.
    """
    outputs = _plain(output)
    is_small = _bytes(outputs) <= _SMALL and all(tensor.is_cpu for tensor in outputs)
    return outputs if is_small else None


def _plain(output: Any) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors_in(output) if is_plain(tensor)]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _off(found: Tensor, first: Tensor) -> float:
    """Return the difference of two tensors as a part of the largest number; 0 if it is rounding."""
    if torch.equal(found, first):
        return 0.0
    if not first.is_floating_point() or first.dtype != found.dtype:
        return float("inf")
    one, other = found.double(), first.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
    off = float((one - other).abs().max() / other.abs().max().clamp_min(1e-300))
    return off if off > torch.finfo(first.dtype).eps ** 0.5 else 0.0
