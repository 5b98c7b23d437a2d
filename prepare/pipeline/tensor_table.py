"""A table of what the steps request of each tensor of a model, and the moves that follow from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from prepare.core.model.memory_format import canonical_stride, satisfied
from prepare.core.model.tensors import NamedTensor, is_expanded, is_strided
from prepare.errors import ConfigError
from prepare.pipeline.transfer import Move, StorageMove
from prepare.plan import steps_of


@cache
def _empty_mapping() -> Mapping[str, Any]:
    """Return one empty mapping, shared by all tensors without requests; never write into it."""
    return {}


@dataclass(slots=True)
class TensorRequest:
    """One tensor, every place that holds it in the model, and what the steps request of it.

    `wants` maps each property (device, dtype, memory_format) to the requested value, and `by` to the
    steps that request it; `skipped` maps each step that is kept off this tensor to the reason. With
    `clamp`, values beyond the range of the new dtype are clamped.
    """

    tensor: Tensor
    places: list[NamedTensor]
    wants: Mapping[str, str] = field(default_factory=_empty_mapping)
    by: Mapping[str, tuple[str, ...]] = field(default_factory=_empty_mapping)
    skipped: Mapping[str, str] = field(default_factory=_empty_mapping)
    clamp: bool = False
    _moves: list[Move | None] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The dotted name of the first place that holds the tensor."""
        return self.places[0].path

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that request something of this tensor, each once."""
        return steps_of(self.by)

    @property
    def tensors(self) -> list[Tensor]:
        """The Python objects of this tensor: one, or several Parameters over one storage."""
        if len(self.places) == 1:
            return [self.tensor]
        return list({id(place.tensor): place.tensor for place in self.places}.values())

    def move(self) -> Move | None:
        """Return the move that fulfils the request, found once; None if the tensor is as requested."""
        if not self._moves:
            self._moves.append(self._move() if self.wants else None)
        return self._moves[0]

    def _move(self) -> Move | None:
        wants, tensor = self.wants, self.tensor
        device = _device(wants["device"], tensor.device) if "device" in wants else tensor.device
        dtype = getattr(torch, wants["dtype"]) if "dtype" in wants else tensor.dtype
        same = device == tensor.device and dtype == tensor.dtype
        stride: tuple[int, ...] | None
        if not is_strided(tensor):
            stride = None
        elif "memory_format" in wants:
            stride = canonical_stride(tensor.shape, wants["memory_format"])
            same = same and stride == tensor.stride()
        else:
            stride = None if same else preserved_stride(tensor)
        return None if same else Move(self.path, self.tensors, device, dtype, stride, self.clamp)


@dataclass(frozen=True)
class StorageGroup:
    """Tensors that are different views of one storage, or one tensor that is expanded over its own."""

    requests: list[TensorRequest]

    def must_separate(self) -> bool:
        """Return whether the requests can be fulfilled only by giving the views storages of their own."""
        moves = [request.move() for request in self.requests]
        if len(moves) == 1 or not any(moves):
            return False
        together = len({move and (move.device, move.dtype) for move in moves}) == 1
        one_dtype = len({request.tensor.dtype for request in self.requests}) == 1
        return not (together and one_dtype) or any(
            move.stride != request.tensor.stride() for move, request in self._moving()
        )

    def move(self) -> Move | StorageMove | None:
        """Return one move for all tensors of the group, or None if nothing changes."""
        for move, request in self._moving():
            if move.stride != request.tensor.stride():
                return move  # an expanded tensor that gets new strides
            named = [(each.path, tensor) for each in self.requests for tensor in each.tensors]
            paths, tensors = zip(*named, strict=True)
            clamp = any(each.clamp for each in self.requests)
            return StorageMove(move.path, tensors, move.device, move.dtype, paths, clamp)
        return None

    def _moving(self) -> list[tuple[Move, TensorRequest]]:
        return [(move, request) for request in self.requests if (move := request.move())]


@dataclass(frozen=True)
class RequestTable:
    """The request for every tensor of a model, and the requests that have no effect, as errors.

    `shared` are the requests of tensors that share storage with others, or that overlap themselves.
    """

    requests: list[TensorRequest]
    errors: list[ConfigError]
    shared: list[list[TensorRequest]]

    def storage_groups(self) -> list[StorageGroup]:
        """Return the groups of tensors that share storage with others, or that overlap themselves."""
        return [StorageGroup(group) for group in self.shared]

    def moves(self) -> list[Move | StorageMove]:
        """Return all moves: one for each tensor, but one for all views of a storage."""
        groups = self.storage_groups()
        grouped = {id(request) for group in groups for request in group.requests}
        single = (request.move() for request in self.requests if id(request) not in grouped)
        return [move for move in (*single, *(group.move() for group in groups)) if move]


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a cast or a device move keeps, as `Tensor.to` does for dense tensors.

    An expanded tensor stays expanded, where `Tensor.to` would write it out in full.
    """
    if satisfied(tensor.shape, tensor.stride()) or is_expanded(tensor):
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


@cache
def _parsed_device(name: str) -> torch.device:
    return torch.device(name)


def _device(name: str | None, current: torch.device) -> torch.device:
    """Return the device of that name; a tensor on cuda:1 already satisfies `cuda`."""
    if name is None:
        return current
    device = _parsed_device(name)
    return current if device.index is None and device.type == current.type else device
