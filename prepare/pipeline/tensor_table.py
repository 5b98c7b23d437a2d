"""A table of what the steps request of each tensor of a model, and the moves and the plan that follow."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from prepare.core.model.forward_overrides import computed_tensors
from prepare.core.model.memory_format import canonical_stride, satisfied
from prepare.core.model.tensors import (
    NamedTensor,
    is_expanded,
    is_strided,
    name_of,
    stored_bytes,
)
from prepare.errors import ConfigError
from prepare.pipeline.plan import State, TensorPlan, state, steps_of
from prepare.pipeline.transfer import AnyMove, Move, StorageMove


@dataclass(slots=True)
class TensorRequest:
    """One tensor, every place that holds it in the model, and what the steps request of it.

    `wants` maps each property (device, dtype, memory_format) to the requested value, and `by` to the
    steps that request it; `skipped` maps each step that is kept off this tensor to the reason. With
    `clamp`, values beyond the range of the new dtype are clamped.
    """

    tensor: Tensor
    places: list[NamedTensor]
    wants: Mapping[str, str] = field(default_factory=dict)
    by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
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

    @property
    def device(self) -> torch.device:
        """The device on which the tensor will be."""
        move = self.move()
        return move.device if move else self.tensor.device

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

    def move(self) -> AnyMove | None:
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

    `shared` are the groups of tensors that share storage with others, or that overlap themselves.
    """

    requests: list[TensorRequest]
    errors: list[ConfigError]
    shared: list[StorageGroup]

    def moves(self) -> list[AnyMove]:
        """Return all moves: one for each tensor, but one for all views of a storage."""
        grouped = {id(request) for group in self.shared for request in group.requests}
        single = (request.move() for request in self.requests if id(request) not in grouped)
        return [move for move in (*single, *(group.move() for group in self.shared)) if move]


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a cast or a device move keeps, as `Tensor.to` does for dense tensors.

    An expanded tensor stays expanded, where `Tensor.to` would write it out in full.
    """
    if satisfied(tensor.shape, tensor.stride()) or is_expanded(tensor):
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def tensor_plans(table: RequestTable) -> list[TensorPlan]:
    """Return a row for every place that holds a tensor, and one for every computed weight, sorted."""
    plans = [plan for request in table.requests for plan in _stored_plans(request)]
    plans += _computed_plans(table)
    return sorted(plans, key=lambda plan: (plan.module, plan.tensor, plan.kind))


def _stored_plans(request: TensorRequest) -> Iterable[TensorPlan]:
    """Yield a row for every place that holds the tensor."""
    tensor, move, places = request.tensor, request.move(), request.places
    old = new = state(tensor)
    strided = old.stride is not None
    bytes_old = bytes_new = stored_bytes(tensor) if strided else 0
    if move:
        new = State(move.stride, name_of(move.dtype), name_of(move.device))
        bytes_new = tensor.numel() * move.dtype.itemsize if new.stride is not None else 0
    shape = tuple(tensor.shape) if strided else None
    wants, by, off = request.wants, request.by, request.skipped
    paths = sorted(place.path for place in places) if len(places) > 1 else ()
    for _, _, name, kind, _, owner, _ in places:
        shared = tuple(p for p in paths if p != (f"{owner}.{name}" if owner else name))
        # By position: a model can have ten thousand rows, and keywords add half of the time.
        yield TensorPlan(
            owner, name, kind, shape, old, new, wants, by, off, shared, bytes_old, bytes_new
        )


def _computed_plans(table: RequestTable) -> Iterable[TensorPlan]:
    """Yield a row for every computed weight, with the requests of the tensors that it is computed from.

    What cannot be computed has a message in place of a tensor, and no state.
    """
    modules: dict[str, nn.Module] = {}
    sources: dict[str, list[tuple[TensorRequest, NamedTensor]]] = {}
    for request in table.requests:
        for place in request.places:
            modules[place.module_name] = place.module
            sources.setdefault(place.module_name, []).append((request, place))
    for module, value in modules.items():
        for name, tensor in computed_tensors(value).items():
            requests = [r for r, place in sources[module] if name in (place.name, place.computes)]
            wants: dict[str, str] = {}
            by: dict[str, tuple[str, ...]] = {}
            off: dict[str, str] = {}
            for request in reversed(requests):  # the first one counts
                wants.update(request.wants)
                by.update(request.by)
                off.update(request.skipped)
            now, shape = State(None, "", ""), None
            if isinstance(tensor, Tensor):
                now, shape = state(tensor), tuple(tensor.shape)
            yield TensorPlan(module, name, "computed", shape, now, now, wants, by, off)


@cache
def _device(name: str, current: torch.device) -> torch.device:
    """Return the device of that name; a tensor on cuda:1 already satisfies `cuda`."""
    device = torch.device(name)
    return current if device.index is None and device.type == current.type else device
