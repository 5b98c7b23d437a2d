"""What is wanted of each tensor of a model, and the moves that make it so."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from prepare.core.model.memory_format import canonical_stride, satisfied
from prepare.core.model.tensors import NamedTensor, is_expanded, is_plain, is_strided
from prepare.errors import ConfigError
from prepare.pipeline.transfer import FlatMove, Move
from prepare.plan import steps_of


@cache
def _nothing() -> Mapping[str, Any]:
    """One empty mapping that all tensors share of which nothing is wanted; nobody writes into it."""
    return {}


@dataclass(slots=True)
class Wanted:
    """One tensor, everywhere it stands in the model, and what is wanted of it.

    `wants` maps each side (device, dtype, memory_format) to what is wanted, and `by` to the steps
    that want it; `off` maps a step that a pattern keeps off this tensor to the reason.
    """

    tensor: Tensor
    places: list[NamedTensor]
    wants: Mapping[str, str] = field(default_factory=_nothing)
    by: Mapping[str, tuple[str, ...]] = field(default_factory=_nothing)
    off: Mapping[str, str] = field(default_factory=_nothing)

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that want something of it, each once."""
        return steps_of(self.by)

    @property
    def tensors(self) -> list[Tensor]:
        """The objects that are this tensor: one, or several Parameters over one storage."""
        return list({id(place.tensor): place.tensor for place in self.places}.values())

    def move(self) -> Move | None:
        """What is to be done, or None where the tensor is as wanted."""
        wants, tensor = self.wants, self.tensor
        if not wants:
            return None
        device = _device(wants["device"], tensor.device) if "device" in wants else tensor.device
        dtype = getattr(torch, wants["dtype"]) if "dtype" in wants else tensor.dtype
        same = device == tensor.device and dtype == tensor.dtype
        if not is_strided(tensor):
            stride = None
        elif "memory_format" in wants:
            stride = canonical_stride(tensor.shape, wants["memory_format"])
            same = same and stride == tensor.stride()
        else:
            stride = None if same else preserved_stride(tensor)
        return None if same else Move(self.places[0].path, self.tensors, device, dtype, stride)


@dataclass(frozen=True)
class Views:
    """Tensors that are different views of one storage, or one that is expanded over its own."""

    tensors: list[Wanted]

    def must_separate(self) -> bool:
        """Whether what is wanted cannot be had without tearing them apart."""
        moves = [wanted.move() for wanted in self.tensors]
        if len(moves) == 1 or not any(moves):
            return False
        together = len({move and (move.device, move.dtype) for move in moves}) == 1
        one_type = len({wanted.tensor.dtype for wanted in self.tensors}) == 1
        return not (together and one_type) or any(
            m.stride != w.tensor.stride() for m, w in self._moving()
        )

    def move(self) -> Move | FlatMove | None:
        """All of them moved as one, or None where there is nothing to do."""
        for move, wanted in self._moving():
            if move.stride != wanted.tensor.stride():
                return move  # an expanded tensor that is to be laid out anew
            tensors = [tensor for each in self.tensors for tensor in each.tensors]
            return FlatMove(move.path, tensors, move.device, move.dtype)
        return None

    def _moving(self) -> list[tuple[Move, Wanted]]:
        return [(move, wanted) for wanted in self.tensors if (move := wanted.move())]


@dataclass(frozen=True)
class Table:
    """Every tensor of a model with what is wanted of it, and the requests that came to nothing."""

    tensors: list[Wanted]
    errors: list[ConfigError]

    def views(self) -> list[Views]:
        """The tensors that share storage with others, or overlap themselves, grouped."""
        by_storage: dict[int, list[Wanted]] = {}
        for wanted in self.tensors:
            if is_plain(wanted.tensor) and wanted.tensor.numel():
                storage = wanted.tensor.untyped_storage()._cdata
                by_storage.setdefault(storage, []).append(wanted)
        return [
            Views(group)
            for group in by_storage.values()
            if len(group) > 1 or is_expanded(group[0].tensor)
        ]

    def moves(self) -> list[Move | FlatMove]:
        """What is to be done: tensor by tensor, but views of one storage together."""
        views = self.views()
        together = {id(wanted) for group in views for wanted in group.tensors}
        alone = (w.move() for w in self.tensors if id(w) not in together)
        return [move for move in (*alone, *(group.move() for group in views)) if move]


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides a cast or a move keeps, as `Tensor.to` does: its own where it is dense.

    Where `Tensor.to` would write an expanded tensor out in full, it stays expanded.
    """
    if satisfied(tensor.shape, tensor.stride()) or is_expanded(tensor):
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


@cache
def _parsed_device(name: str) -> torch.device:
    return torch.device(name)


def _device(name: str | None, now: torch.device) -> torch.device:
    """The device of that name; a tensor on cuda:1 is where `cuda` wants it."""
    if name is None:
        return now
    wanted = _parsed_device(name)
    return now if wanted.index is None and wanted.type == now.type else wanted
