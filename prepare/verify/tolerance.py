"""How far a prepared model's numbers may lie from exact ones, and which of them lie further.

The rule, for each tensor: its error is the largest difference from the exact run (float64 where
that fits), and

    allowed = max(FACTOR * noise, FLOOR * eps * sqrt(depth) * scale, LEAST * eps * largest)

`noise` is the error that the *unprepared* model makes in the very dtypes of the prepared one, in
the contiguous format: a bfloat16 model is allowed bfloat16's error, and no more than a few times of
it. Where torch lacks a kernel for that, it is the error in float32 with all that modules take and give
rounded. `eps` is that of the coarsest dtype of the prepared model, `depth` the number of its layers with
weights: rounding errors of one layer add up as a random walk. `scale` is the largest number of the
exact tensor; for a gradient that of its whole module, so that the bias of a convolution before a
norm, whose true gradient is 0, is measured by its weight. `largest` is that of all gradients of the
model. A noise of several times `largest` does not count: where the unprepared model gives garbage,
the prepared one may not.

Rounding may turn the input of a ReLU, or the winner of a max pooling, and then single gradients
differ by far more than that. So what exceeds is looked at again: `noise` is then also the error of
the unprepared model with a forward that is off by as much as the prepared one's outputs are (see
`prepare.verify.execution.perturbation`), and the same is done on slightly other inputs. A difference
counts if it is there every time, or is larger than any noise that counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FACTOR = 6.0
# A 16-bit kernel adds up in float32 and rounds once; one of float32 rounds at every addition.
FLOOR = {torch.float16: 4.0, torch.bfloat16: 4.0}
OTHER_FLOORS = 64.0
LEAST = {torch.float16: 1.0, torch.bfloat16: 1.0}
OTHER_LEAST = 16.0
MOST = 4.0
# Where the noise is more than this part of the tensor itself, agreement would say nothing.
TOO_NOISY = 0.5
SUBSTANTIAL = 0.1

Named = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Difference:
    """The error of one tensor, what is allowed, and the noise, as parts of its scale.

    The error is NaN where there is none, and `note` says why. `share` is the scale as a part of the
    largest of all tensors that were compared with it.
    """

    name: str
    error: float
    allowed: float
    noise: float
    share: float = 1.0
    note: str = ""

    @property
    def exceeds(self) -> bool:
        """Whether the error is more than is allowed."""
        return not self.error <= self.allowed

    @property
    def is_plainly_wrong(self) -> bool:
        """Whether the unprepared model in this dtype is wrong as well, in any layout."""
        return self.noise * self.share > MOST

    @property
    def is_beyond_noise(self) -> bool:
        """Whether no noise that counts could make it allowed."""
        return not self.error * self.share <= FACTOR * MOST

    @property
    def excess(self) -> float:
        """By how much; infinite where a number is missing."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.allowed if self.allowed else math.inf * bool(self.error)


def floor_of(dtype: torch.dtype, depth: int) -> float:
    """What rounding in so many layers may add up to, as a part of a tensor's scale."""
    each = FLOOR.get(dtype, OTHER_FLOORS) * torch.finfo(dtype).eps
    return each * math.sqrt(max(depth, 1))


def step_of(dtype: torch.dtype) -> float:
    """What one module may add to the error, as a part of what it gives."""
    return LEAST.get(dtype, OTHER_LEAST) * torch.finfo(dtype).eps


def compare(
    exact: Named,
    plain: Sequence[Named],
    ours: Named,
    *,
    dtype: torch.dtype,
    depth: int,
    scaled: str = "",
) -> list[Difference]:
    """The difference of every tensor of `ours` from `exact`; `plain` are runs of the unprepared model.

    `scaled` says on what scale: "module", by the largest floating-point tensor of the module; and
    "gradient", where one that is missing is the same as zeros, and which may be off by `eps` of the
    largest one of all.
    """
    sizes = {name: _largest(tensor) for name, tensor in exact.items()}
    scales = _by_module(exact, sizes) if "module" in scaled else sizes
    gradients = "gradient" in scaled
    largest = max(sizes.values(), default=0.0)
    floor = floor_of(dtype, depth)
    found = []
    for name in dict.fromkeys((*exact, *ours)):
        one, other = exact.get(name), ours.get(name)
        if one is None and other is None:
            continue
        note = _unlike(one, other, gradients=gradients)
        noise = max((_noise(one, run.get(name)) for run in plain), default=0.0)
        size = scales.get(name, 0.0)
        least = step_of(dtype) * largest if gradients else 0.0
        is_garbage = noise > MOST * largest
        allowed = max(0.0 if is_garbage else FACTOR * noise, floor * size, least)
        error, scale = math.nan if note else _distance(one, other), size or largest or 1.0
        share = scale / (largest or 1.0)
        found.append(Difference(name, error / scale, allowed / scale, noise / scale, share, note))
    return found


def not_finite(tensors: Named) -> str:
    """The name of a tensor that holds NaN or Inf; empty where none does."""
    return next((name for name, t in tensors.items() if t is not None and not _finite(t)), "")


def too_noisy(differences: Iterable[Difference]) -> bool:
    """Whether the unprepared model in this dtype is itself too far from exact to compare with.

    That is so if half of all tensors are, or one of some weight is all noise.
    """
    found = sorted(differences, key=lambda one: one.noise)
    if not found:
        return False
    lost = any(one.noise > 1.0 and one.share > SUBSTANTIAL for one in found)
    return lost or found[len(found) // 2].noise > TOO_NOISY


def _unlike(exact: Tensor | None, ours: Tensor | None, *, gradients: bool) -> str:
    if gradients and (exact is None or ours is None):
        if not _largest(exact) and not _largest(ours):  # none at all, or zeros: the same
            return ""
        return (
            "a gradient arrives, and none in the reference"
            if exact is None
            else "no gradient arrives"
        )
    if ours is None or exact is None:
        return "is missing" if ours is None else "is not in the reference"
    if exact.shape != ours.shape:
        return f"has shape {list(ours.shape)}, in the reference {list(exact.shape)}"
    return "" if _finite(ours) else "holds NaN or Inf"


def _noise(exact: Tensor | None, plain: Tensor | None) -> float:
    distance = _distance(exact, plain)
    return distance if math.isfinite(distance) else math.inf


def _distance(exact: Tensor | None, ours: Tensor | None) -> float:
    if exact is None or ours is None or exact.shape != ours.shape:
        return 0.0
    return _largest(_plain(exact) - _plain(ours))


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    return float(_plain(tensor).abs().max())


def _plain(tensor: Tensor) -> Tensor:
    """In float64 on the CPU, dense, contiguous: the comparison itself must not err."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to("cpu", torch.complex128).resolve_conj())
    return tensor.to("cpu", torch.float64, memory_format=torch.contiguous_format)


def _finite(tensor: Tensor) -> bool:
    return bool(_plain(tensor).isfinite().all())


def _by_module(tensors: Named, sizes: Mapping[str, float]) -> dict[str, float]:
    """The size of the largest tensor in each one's module; a counter stands for itself."""
    groups: dict[str, float] = {}
    floats = {n for n, t in tensors.items() if t is None or t.is_floating_point() or t.is_complex()}
    for name in floats:
        module = name.rpartition(".")[0]
        groups[module] = max(groups.get(module, 0.0), sizes[name])
    return {n: groups[n.rpartition(".")[0]] if n in floats else sizes[n] for n in sizes}
