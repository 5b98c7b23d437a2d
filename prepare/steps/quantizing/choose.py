"""Choose the weights that are quantized, and say of every other one why it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from prepare.core.model.quantized import dtype_text, is_quantized, scale_text, stored_bytes
from prepare.core.model.tensors import NamedTensor, identity, is_lazy, named_tensors
from prepare.errors import PatternError
from prepare.patterns import matches, near_misses
from prepare.step import Storage

# torchao computes the scales of these.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# cuBLAS multiplies int8 matrices whose sizes are multiples of this; torchao computes others on the CPU.
_CUBLAS = 8
_SCALE_BYTES, _ZERO_POINT_BYTES = 4, 1


class Grid(NamedTuple):
    """The rounding of weights: values that share a scale (None for a row), and whether inputs are rounded."""

    group_size: int | None
    inputs: bool

    def block(self, weight: Tensor) -> tuple[int, int]:
        """Return the shape of the values that share a scale."""
        return 1, self.group_size or weight.shape[1]

    def storage(self, weight: Tensor) -> Storage:
        """Return how this weight is stored."""
        block = self.block(weight)
        text = scale_text("int8", tuple(weight.shape), block, inputs=self.inputs)
        scales = weight.shape[0] * (weight.shape[1] // block[1])
        return Storage(text, weight.numel() + scales * (_SCALE_BYTES + _ZERO_POINT_BYTES))


@dataclass(frozen=True)
class WeightChoice:
    """The patterns and the rounding of a step, and the device on which the model will run."""

    step: str
    grid: Grid
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    device: str | None

    def storages(self, model: nn.Module) -> dict[str, Storage]:
        """Return, for every tensor of weights by its path, how it is stored or why it stays as it is.

        Raises:
            PatternError: a pattern matches no Linear.
        """
        places = [place for place in named_tensors(model) if _holds_weights(place)]
        self._check_patterns(places)
        tied: dict[object, list[NamedTensor]] = {}
        for place in places:
            tied.setdefault(identity(place.tensor), []).append(place)
        found: dict[str, Storage] = {}
        for group in tied.values():
            found |= self._stored(group)
        return found

    def pending(self, model: nn.Module) -> list[NamedTensor]:
        """Return every place of every weight that is still to be quantized."""
        storages = self.storages(model)
        return [
            place
            for place in named_tensors(model)
            if place.path in storages
            and storages[place.path].dtype
            and not is_quantized(place.tensor)
        ]

    def _stored(self, group: list[NamedTensor]) -> Mapping[str, Storage]:
        """Return the storage of all places of one tensor: it is quantized in all, or in none."""
        left = [(place, answer) for place in group if (answer := self._left(place))]
        if not left:
            storage = self._storage(group[0].tensor)
            return {place.path: storage for place in group}
        return {place.path: _left_with(place, left) for place in group}

    def _storage(self, weight: Tensor) -> Storage:
        if is_quantized(weight):
            return Storage(dtype_text(weight), stored_bytes(weight))
        return self.grid.storage(weight)

    def _left(self, place: NamedTensor) -> Storage | None:
        """Return why the tensor is not quantized because of this place, or None."""
        if reason := self._reason(place):
            return Storage(reason=reason)
        pattern = next((p for p in self.exclude if _matches(p, place)), None)
        if pattern is not None:
            return Storage(reason=f"exclude: {pattern}", is_excluded=True)
        if self.include and not any(_matches(p, place) for p in self.include):
            return Storage(reason="include: no pattern matches", is_excluded=True)
        return None

    def _reason(self, place: NamedTensor) -> str:
        """Return what in the module or its tensor is in the way; empty for nothing."""
        module, weight, kind = place.module, place.tensor, type(place.module).__name__
        if place.computes:
            return f"{kind} computes its {place.computes} from it"
        if not _is_linear(place):
            return "torchao quantizes weights of Linear only"
        if isinstance(module, NonDynamicallyQuantizableLinear):
            return "MultiheadAttention reads it itself"
        if type(module).forward is not nn.Linear.forward:
            return f"{kind} has a forward of its own"
        if is_quantized(weight):
            wanted, current = self.grid.storage(weight).dtype, dtype_text(weight)
            return "" if current == wanted else f"is {current} already, and not {wanted}"
        if weight.dtype not in _FLOATS:
            return f"torchao quantizes no {str(weight.dtype).removeprefix('torch.')}"
        if not weight.numel():
            return "holds no values"
        size = self.grid.group_size
        if size and weight.shape[1] % size:
            return f"group_size {size} does not divide its {weight.shape[1]} columns"
        device = self.device or weight.device.type
        if (
            self.grid.inputs
            and device.partition(":")[0] == "cuda"
            and any(length % _CUBLAS for length in weight.shape)
        ):
            return f"cuBLAS needs multiples of {_CUBLAS} as sizes, and torchao would use the CPU"
        return ""

    def _check_patterns(self, places: list[NamedTensor]) -> None:
        linear = {place.module_name: place.module for place in places if _is_linear(place)}
        for option in ("include", "exclude"):
            for pattern in getattr(self, option):
                if not any(matches(pattern, name, module) for name, module in linear.items()):
                    wrong = f"{pattern!r} matches no Linear"
                    where = f"steps.{self.step}.{option}"
                    raise PatternError(where, wrong, near_misses(pattern, linear))


def quantized_places(model: nn.Module) -> Iterator[NamedTensor]:
    """Yield every place of every quantized weight of a Linear."""
    return (p for p in named_tensors(model) if _is_linear(p) and is_quantized(p.tensor))


def _holds_weights(place: NamedTensor) -> bool:
    """Return whether the tensor may be a weight: a parameter of at least two dimensions."""
    tensor = place.tensor
    if place.kind != "parameter" or is_lazy(tensor) or tensor.dim() < 2:
        return False
    return tensor.is_floating_point() or is_quantized(tensor)


def _is_linear(place: NamedTensor) -> bool:
    return isinstance(place.module, nn.Linear) and place.name == "weight"


def _matches(pattern: str, place: NamedTensor) -> bool:
    return matches(pattern, place.module_name, place.module)


def _left_with(place: NamedTensor, left: list[tuple[NamedTensor, Storage]]) -> Storage:
    """Return why a tensor stays in this place, which may be because of another one."""
    for other, answer in left:
        if other is place:
            return answer
    other, answer = left[0]
    return answer._replace(reason=f"{answer.reason} (as {other.path})")
