"""Compare the tensors of a prepared model with exact ones, within a tolerance that follows from the dtype.

The error of a tensor is its largest difference from the exact run (float64 if that fits). The tolerance is

    allowed = max(FACTOR * noise, FLOOR * eps * sqrt(depth) * scale, LEAST * eps * largest)

* `noise` is the error of the *baseline*: the unprepared model in the prepared model's dtypes, in the
  contiguous format. So a bfloat16 model is allowed a few times the error of bfloat16. If torch lacks a
  kernel for that, the noise is the error in float32 with the inputs and outputs of all modules rounded.
* `eps` is that of the prepared model's coarsest dtype; `depth` is the number of its layers with weights.
  The rounding errors of the layers add up like a random walk.
* `scale` is the largest number of the exact tensor; for a parameter's gradient, that of all gradients of
  its module. So the bias of a convolution before a norm, whose true gradient is 0, is measured by its weight.
* `largest` is that of all gradients of the model. Noise of several times `largest` is ignored: garbage from
  the baseline does not excuse garbage from the prepared model.

Rounding may flip the sign of a ReLU's input, or change the maximum of a pooling window; then single
gradients differ by far more than the tolerance. Therefore a tensor that exceeds its tolerance is compared
again: `noise` then includes the error of the baseline with a forward that is perturbed by as much as the
prepared model's outputs are off (see `prepare.stages.verify.execution.hooks`), and the comparison is
repeated on slightly different inputs. A difference counts if it appears every time, or if it is larger than
any noise could excuse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prepare.core.utils.numbers import part_of_tolerance

FACTOR = 6.0
# A 16-bit kernel accumulates in float32 and rounds once; a float32 kernel rounds at every addition.
FLOOR = {torch.float16: 4.0, torch.bfloat16: 4.0}
FLOOR_DEFAULT = 64.0
LEAST = {torch.float16: 1.0, torch.bfloat16: 1.0}
LEAST_DEFAULT = 16.0
# Noise of more than this multiple of the largest number is garbage.
GARBAGE = 4.0
# If the noise is more than this fraction of the tensor itself, agreement is meaningless.
TOO_NOISY = 0.5
SUBSTANTIAL = 0.1
NEGLIGIBLE = 1e-3
# An error is a common factor if no more than this part of it is left without the factor, in a tensor whose
# numbers count as so many equal ones: amplified rounding has a factor of its own for each number.
_LEFT, _EQUAL = 0.25, 8.0

# The dtypes whose largest number is read without a copy; not every device and dtype has the operator.
_DIRECT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

NamedTensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Deviation:
    """The error of one tensor, its tolerance and its noise, each as a fraction of the tensor's scale.

    The error is NaN if the tensors cannot be subtracted; then `note` says why. `share` is the scale as a
    fraction of the largest number of all tensors that were compared together, `size` the tensor's own largest
    number as a fraction of the scale. `is_factor`: the error exceeds the tolerance, and is a factor that all
    numbers have in common.
    """

    name: str
    error: float
    allowed: float
    noise: float
    share: float = 1.0
    note: str = ""
    size: float = 1.0
    is_factor: bool = False

    @property
    def exceeds(self) -> bool:
        """Return True if the error exceeds the tolerance."""
        return not self.error <= self.allowed

    @property
    def finds(self) -> float:
        """The smallest systematic error that exceeds the tolerance, as a fraction of the tensor itself."""
        return self.allowed / self.size if self.size else math.inf

    @property
    def is_baseline_wrong(self) -> bool:
        """Return True if the unprepared model in this dtype, in the contiguous format, is wrong as well."""
        return self.noise * self.share > GARBAGE

    @property
    def is_beyond_noise(self) -> bool:
        """Return True if the error is larger than any noise could excuse."""
        return not self.error * self.share <= FACTOR * GARBAGE

    @property
    def excess(self) -> float:
        """Ratio of the error to the tolerance; infinite if the error is NaN."""
        if math.isnan(self.error):
            return math.inf
        return part_of_tolerance(self.error, self.allowed) or 0.0


def rounding_floor(dtype: torch.dtype, depth: int) -> float:
    """Return the error that rounding in `depth` layers may add up to, as a fraction of a tensor's scale."""
    per_layer = FLOOR.get(dtype, FLOOR_DEFAULT) * torch.finfo(dtype).eps
    return per_layer * math.sqrt(max(depth, 1))


def rounding_step(dtype: torch.dtype) -> float:
    """Return the error that one module may add, as a fraction of its output."""
    return LEAST.get(dtype, LEAST_DEFAULT) * torch.finfo(dtype).eps


def largest_error(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> float:
    """Return the largest error of (exact, actual) tensors, each as a fraction of the largest exact number.

    Infinite if an actual number is not finite; tensors with an exact number that is not finite, and those of
    whole numbers, are left out.
    """
    worst = 0.0
    for exact, actual in pairs:
        if exact is None or not exact.is_floating_point() or not _is_finite(exact):
            continue
        error = _distance(exact, actual)
        worst = max(worst, error / (_largest(exact) or 1.0) if math.isfinite(error) else math.inf)
    return worst


def compare(
    exact: NamedTensors,
    baseline: Sequence[NamedTensors],
    prepared: NamedTensors,
    *,
    dtype: torch.dtype,
    depth: int,
    gradients: bool = False,
    by_module: bool = False,
    factor: float = FACTOR,
    garbage: float = GARBAGE,
    scales: Mapping[str, float] | None = None,
) -> list[Deviation]:
    """Compare every tensor of `prepared` with `exact`; `baseline` holds runs of the unprepared model.

    With `by_module` the scale of a tensor is that of the largest floating-point tensor of its module.
    With `gradients` a missing tensor equals zeros, and every tensor may be off by `eps` of the largest
    number of all. `factor` and `garbage` are the multiple of the noise that is allowed, and that of the
    largest number from which noise is ignored. A tensor's scale is at least that in `scales`.
    """
    least_scales = scales or {}
    own_sizes = {name: _largest(tensor) for name, tensor in exact.items()}
    sizes = {n: max(size, least_scales.get(n, 0.0)) for n, size in own_sizes.items()}
    scales = _by_module(exact, sizes) if by_module else sizes
    largest = max(sizes.values(), default=0.0)
    floor = rounding_floor(dtype, depth)
    differences = []
    for name in dict.fromkeys((*exact, *prepared)):
        expected, actual = exact.get(name), prepared.get(name)
        if expected is None and actual is None:
            continue
        note = _mismatch(expected, actual, gradients=gradients)
        noise = max((_noise(expected, run.get(name)) for run in baseline), default=0.0)
        size = scales.get(name, 0.0)
        least = rounding_step(dtype) * largest if gradients else 0.0
        is_garbage = noise > garbage * largest
        allowed = max(0.0 if is_garbage else factor * noise, floor * size, least)
        error, scale = math.nan if note else _distance(expected, actual), size or largest or 1.0
        if not note and not math.isfinite(error) and not _is_finite(actual):
            note, error = "contains NaN or Inf", math.nan
        share, own = scale / (largest or 1.0), own_sizes.get(name, 0.0) / scale
        is_factor = gradients and error > allowed and _is_factor(expected, actual)
        differences.append(
            Deviation(
                name, error / scale, allowed / scale, noise / scale, share, note, own, is_factor
            )
        )
    return differences


def sensitivity(
    deviations: Iterable[Deviation], *, by_module: bool, negligible: float = NEGLIGIBLE
) -> tuple[float, str]:
    """Return the smallest systematic error that exceeds the tolerance everywhere, and the worst place.

    An error that is common to all tensors of a module is found if it exceeds the tolerance of one of them.
    Tensors of zeros, or of less than `negligible` of the largest number, are left out. NaN if none is left.
    """
    least: dict[str, float] = {}
    for item in deviations:
        if item.share >= negligible and item.size and not item.note:
            place = item.name.rpartition(".")[0] if by_module else item.name
            least[place] = min(item.finds, least.get(place, math.inf))
    return max(((value, place) for place, value in least.items()), default=(math.nan, ""))


def first_non_finite(tensors: NamedTensors) -> str:
    """Return the name of the first tensor that contains NaN or Inf; empty if all are finite."""
    return next((name for name, t in tensors.items() if not _is_finite(t)), "")


def all_finite(tensors: NamedTensors) -> bool:
    """Return True if no tensor contains NaN or Inf."""
    return not first_non_finite(tensors)


def all_zero(tensors: NamedTensors) -> bool:
    """Return True if no tensor contains a number other than zero."""
    return not any(_largest(tensor) for tensor in tensors.values())


def is_too_noisy(differences: Iterable[Deviation]) -> bool:
    """Return True if the baseline itself is too far from exact for a comparison to mean anything.

    That is so if half of all tensors are too noisy, or if one tensor of substantial size is all noise.
    """
    by_noise = sorted(differences, key=lambda difference: difference.noise)
    if not by_noise:
        return False
    all_noise = any(item.noise > 1.0 and item.share > SUBSTANTIAL for item in by_noise)
    return all_noise or by_noise[len(by_noise) // 2].noise > TOO_NOISY


def _mismatch(exact: Tensor | None, prepared: Tensor | None, *, gradients: bool) -> str:
    """Say why two tensors cannot be subtracted; empty if they can."""
    if gradients and (exact is None or prepared is None):
        if not _largest(exact) and not _largest(prepared):  # a missing gradient equals zeros
            return ""
        return "has a gradient, but not in the reference" if exact is None else "has no gradient"
    if prepared is None or exact is None:
        return "is missing" if prepared is None else "is not in the reference"
    if exact.shape != prepared.shape:
        return f"has shape {list(prepared.shape)}, in the reference {list(exact.shape)}"
    return ""


def _noise(exact: Tensor | None, baseline: Tensor | None) -> float:
    distance = _distance(exact, baseline)
    return distance if math.isfinite(distance) else math.inf


def _distance(exact: Tensor | None, other: Tensor | None) -> float:
    if exact is None or other is None or exact.shape != other.shape:
        return 0.0
    return _largest(_to_float64(exact) - _to_float64(other))


def _is_factor(exact: Tensor | None, other: Tensor | None) -> bool:
    """Return True if `other` is `exact` times one number, the best in the sense of least squares."""
    if exact is None or other is None or not exact.numel() or not exact.any():
        return False
    x, y = _to_float64(exact).flatten(), _to_float64(other).flatten()
    x, y = x / x.abs().max(), y / x.abs().max()
    left = y - x * (x.dot(y) / x.dot(x))
    equal = float(
        x.dot(x) ** 2 / x.pow(4).sum()
    )  # n for n equal numbers, 1 if one outweighs all others
    return equal >= _EQUAL and float(left.abs().max()) <= _LEFT * float((y - x).abs().max())


def _largest(tensor: Tensor | None) -> float:
    """Return the largest absolute number, NaN if there is one."""
    if tensor is None or not tensor.numel():
        return 0.0
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dtype in _DIRECT:
        return max(abs(float(each)) for each in torch.aminmax(tensor.detach()))
    return float(_to_float64(tensor).abs().max())


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, and a sparse one, as gradients of an embedding may be, dense."""
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _to_float64(tensor: Tensor) -> Tensor:
    """Copy to float64 on the CPU, dense and contiguous, so that the comparison itself is exact."""
    tensor = dense(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to("cpu", torch.complex128).resolve_conj())
    return tensor.to("cpu", torch.float64, memory_format=torch.contiguous_format)


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(dense(tensor).isfinite().all())


def _by_module(tensors: NamedTensors, sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the size of the largest floating-point tensor in each tensor's module; integers keep theirs."""
    groups: dict[str, float] = {}
    floats = {n for n, t in tensors.items() if t is None or t.is_floating_point() or t.is_complex()}
    for name in floats:
        module = name.rpartition(".")[0]
        groups[module] = max(groups.get(module, 0.0), sizes[name])
    return {n: groups[n.rpartition(".")[0]] if n in floats else sizes[n] for n in sizes}
