"""Compare the tensors of a prepared model with exact ones, within the error that their dtype explains.

The error of a tensor is its largest difference from the exact run, as a fraction of its scale: its largest
number, or that of its module for a parameter's gradient and a buffer. Allowed is the largest of

* FACTOR times the noise: the error of the unprepared model in the same dtypes, in the contiguous format;
* four `rounding_step` * sqrt(depth): rounding errors of so many layers add up like a random walk;
* for a gradient, one `rounding_step` of the largest gradient of all, and of a module alone more for each
  number that is a sum of many.

Noise of several times the largest number is ignored: garbage does not excuse garbage. Whole numbers must be
equal, and a gradient of zeros is wrong wherever the noise alone is smaller than the exact gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prepare.core.utils.text import part_of_tolerance

FACTOR, GARBAGE = 6.0, 4.0
# A 16-bit kernel accumulates in float32 and rounds once; a float32 kernel rounds at every addition.
_ROUNDINGS, _ROUNDINGS_16 = 16.0, 1.0
# Tensors of less than this part of the largest number say nothing about the sensitivity.
_NEGLIGIBLE = 1e-3
# An error is a common factor if no more than this part of it is left without the factor, in a tensor whose
# numbers count as so many equal ones: amplified rounding has a factor of its own for each number.
_LEFT, _EQUAL = 0.25, 8.0

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor and what is allowed, as fractions of the tensor's scale.

    The error is NaN if the tensors cannot be subtracted; then `note` says why. `size` is the tensor's own
    largest number as a fraction of the scale, `share` the scale as a fraction of the largest of all tensors
    that were compared together. `is_factor`: all numbers are wrong by one factor.
    """

    kind: str
    name: str
    error: float
    allowed: float
    size: float = 1.0
    share: float = 1.0
    note: str = ""
    is_factor: bool = False

    @property
    def exceeds(self) -> bool:
        """Return True if the error is more than allowed."""
        return not self.error <= self.allowed

    @property
    def excess(self) -> float:
        """The error in multiples of what is allowed; infinite if the error is NaN."""
        part = part_of_tolerance(self.error, self.allowed) or 0.0
        return math.inf if math.isnan(self.error) else part

    @property
    def is_garbage(self) -> bool:
        """Return True if the error is larger than any noise could excuse."""
        return not self.error * self.share <= FACTOR * GARBAGE


def compare(
    kind: str,
    exact: Named,
    noisy: Sequence[Named],
    actual: Named,
    *,
    dtype: torch.dtype,
    depth: int,
) -> list[Deviation]:
    """Compare every tensor of `actual` with `exact`; `noisy` holds runs of the unprepared model."""
    gradients = "gradients" in kind
    sizes = {name: largest(tensor) for name, tensor in exact.items()}
    scales = _by_module(exact, sizes) if kind in ("buffers", "parameter gradients") else sizes
    most = max((size for size in scales.values() if math.isfinite(size)), default=0.0)
    floor = 4 * rounding_step(dtype) * math.sqrt(max(depth, 1))
    step = rounding_step(dtype) * most if gradients else 0.0
    longest = max((tensor.numel() for tensor in exact.values()), default=1)
    found = []
    for name in dict.fromkeys((*exact, *actual)):
        right, given = exact.get(name), actual.get(name)
        if gradients:  # a missing gradient equals zeros
            right = torch.zeros_like(actual[name]) if right is None else right
            given = torch.zeros_like(right) if given is None else given
        if right is None or given is None or right.shape != given.shape:
            found.append(Deviation(kind, name, math.nan, 0.0, note=_mismatch(right, given)))
            continue
        scale = scales.get(name, 0.0) or most or 1.0
        # The gradient of a module's parameter is a sum, and may cancel.
        terms = longest / max(right.numel(), 1) if kind == "module gradients" else 1.0
        least = step * math.sqrt(terms)
        noise = max((distance(right, run[name]) for run in noisy if name in run), default=0.0)
        garbage = not noise <= GARBAGE * most
        allowed = max(0.0 if garbage else FACTOR * noise, floor * scale, least)
        error, size, note = distance(right, given), sizes.get(name, 0.0), ""
        if not right.is_floating_point() and not right.is_complex():
            allowed = noise
        if gradients and size > max(noise, floor * size, least) and not largest(given):
            allowed, note = 0.0, "is zero"
        if math.isfinite(size) and not math.isfinite(largest(given)):
            error, note = math.nan, "contains NaN or Inf"
        parts = error / scale, allowed / scale, size / scale, scale / (most or 1.0)
        factor = gradients and error > allowed and _is_factor(right, given)
        found.append(Deviation(kind, name, *parts, note=note, is_factor=factor))
    return found


def rounding_step(dtype: torch.dtype) -> float:
    """Return the error that one module may add, as a fraction of its output."""
    return torch.finfo(dtype).eps * (_ROUNDINGS_16 if dtype.itemsize == 2 else _ROUNDINGS)


def _mismatch(right: Tensor | None, given: Tensor | None) -> str:
    if right is None or given is None:
        return "is missing" if given is None else "is not in the reference"
    return f"has shape {list(given.shape)}, in the reference {list(right.shape)}"


def sensitivity(items: Iterable[Deviation], *, by_module: bool) -> tuple[float, str] | None:
    """Return the smallest systematic error that is found everywhere, and the least sensitive place.

    An error that all tensors of a module have in common is found if it exceeds what one of them is allowed.
    """
    least: dict[str, float] = {}
    for item in items:
        if item.size and not item.note and item.share >= _NEGLIGIBLE:
            place = item.name.rpartition(".")[0] if by_module else item.name
            least[place] = min(item.allowed / item.size, least.get(place, math.inf))
    return max(((v, place) for place, v in least.items() if math.isfinite(v)), default=None)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute number; NaN if there is one."""
    return float(in_float64(tensor).abs().max()) if tensor.numel() else 0.0


def distance(exact: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors; infinite if it is not a number."""
    if exact.shape != other.shape:
        return 0.0
    difference = largest(in_float64(exact) - in_float64(other))
    return math.inf if math.isnan(difference) else difference


def is_under(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is that of one of these modules, or lies in it."""
    return any(not name or f"{path}.".startswith(f"{name}.") for name in modules)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor, which may be sparse, holds neither NaN nor Inf."""
    return math.isfinite(largest(tensor))


def in_float64(tensor: Tensor) -> Tensor:
    """Copy to float64 on the CPU, dense and contiguous, so that the comparison itself is exact."""
    tensor = tensor.detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to("cpu", torch.complex128).resolve_conj())
    return tensor.to("cpu", torch.float64, memory_format=torch.contiguous_format)


def _is_factor(exact: Tensor, other: Tensor) -> bool:
    """Return True if `other` is `exact` times one number, the best in the sense of least squares."""
    x, y = in_float64(exact).flatten(), in_float64(other).flatten()
    left = y - x * (x.dot(y) / x.dot(x))
    equal = float(x.dot(x) ** 2 / x.pow(4).sum())
    return equal >= _EQUAL and float(left.abs().max()) <= _LEFT * float((y - x).abs().max())


def _by_module(tensors: Named, sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the size of the largest floating-point tensor in each tensor's module; integers keep theirs."""
    groups: dict[str, float] = {}
    floats = {n for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    for name in floats:
        module = name.rpartition(".")[0]
        groups[module] = max(groups.get(module, 0.0), sizes[name])
    return {n: groups[n.rpartition(".")[0]] if n in floats else sizes[n] for n in sizes}
