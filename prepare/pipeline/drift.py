"""What has drifted from what a pipeline wants, a guard that watches for it, and a copy brought into line."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from prepare.core.model.module_tree import Snapshot
from prepare.core.model.tensors import NamedTensor, identity, is_strided, name_of, named_tensors
from prepare.core.utils.signals import held_interrupts
from prepare.errors import DriftError, Problem, RefusedError
from prepare.pipeline.optimizer_state import misplaced, same_order, strangers
from prepare.pipeline.transfer import Move, Transfer
from prepare.plan import Plan, State, state
from prepare.steps.repairs import find, names

_REMEDY = "apply the pipeline again, with optimizer= if one holds state; load checkpoints without assign=True"


@dataclass(frozen=True)
class Drift:
    """One side of one tensor, or one module, that is not as it was prepared."""

    where: str
    what: str
    is_now: object
    wanted: object

    def __str__(self) -> str:
        return f"{self.where}: {self.what} is {self.is_now}, prepared as {self.wanted}"


def drifted(plan: Plan) -> list[Drift]:
    """What a plan, made after `apply`, finds to do again."""
    modules = [
        Drift(name or "the model", "the module", "as before", action.step)
        for action in plan.actions
        for name in action.modules
    ]
    return [
        *modules,
        *(
            drift
            for tensor in plan.tensors
            for drift in _sides(_path(tensor.module, tensor.tensor), tensor.old, tensor.new)
        ),
    ]


def drifted_state(model: nn.Module, optimizer: Optimizer) -> list[Drift]:
    """What of the state of `optimizer` is not as its parameters are, and whether it trains `model` at all."""
    orphaned = any(strangers(model, optimizer))
    found = [Drift("optimizer", "what it trains", "another model", "this one")] if orphaned else []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, move in misplaced(optimizer, {}):
        if same_order(move.tensors[0], parameter):
            continue
        where = f"{move.path} of {names.get(id(parameter), 'a parameter of another model')}"
        wanted = State(move.stride, name_of(move.dtype), name_of(move.device))
        found += _sides(where, state(move.tensors[0]), wanted)
    return found


def raise_on(drifts: Iterable[Drift]) -> None:
    """Raises DriftError, with one problem each, if there are any."""
    problems = [Problem(d.where, f"{d.what} is {d.is_now}, prepared as {d.wanted}") for d in drifts]
    if problems:
        problems[-1] = Problem(problems[-1].where, problems[-1].wrong, _REMEDY)
        raise DriftError.of(problems)


class _Held(NamedTuple):
    """A tensor where a module holds it, and how it lay when the guard was made."""

    table: Mapping[str, Tensor | None]
    name: str
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    path: str


class Guard:
    """Remembers how a prepared model lies; every so many calls it looks whether it still does.

    Under a millisecond for 500 tensors, so it may stand in the training loop:

    >>> model = nn.Conv2d(8, 8, 3)
    >>> guard = Guard(model, every=100)
    >>> guard()
    """

    def __init__(self, model: nn.Module, *, every: int = 1) -> None:
        if every < 1:
            raise RefusedError("every", f"{every} is not at least 1", "1 looks at every call")
        self._every, self._calls = every, 0
        self._modules = [
            (module._modules, key, child, type(child), f"{name}.{key}" if name else key)
            for name, module in model.named_modules()
            for key, child in module._modules.items()
        ]
        self._held = [
            _Held(table, key, _stride(tensor), tensor.dtype, tensor.device, f"{name}.{key}")
            for name, module in model.named_modules()
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]

    def __call__(self) -> None:
        """Raises DriftError if this call is the turn to look, and the model no longer lies as it did."""
        self._calls += 1
        if self._calls % self._every == 0:
            raise_on(self.look())

    def look(self) -> list[Drift]:
        """What differs now, whatever the turn."""
        found = []
        for table, key, child, cls, path in self._modules:
            now = table.get(key)
            if now is not child or type(now) is not cls:
                is_now = "another module" if now is not child else type(now).__name__
                found.append(Drift(path, "the module", is_now, cls.__name__))
        for table, name, stride, dtype, device, path in self._held:
            tensor = table.get(name)
            if tensor is None:
                found.append(Drift(path.lstrip("."), "the tensor", "gone", "there"))
            elif tensor.dtype is not dtype or tensor.device != device or _stride(tensor) != stride:
                wanted = State(stride, name_of(dtype), name_of(device))
                found += _sides(path.lstrip("."), state(tensor), wanted)
        return found


def bring_into_line(model: nn.Module, reference: nn.Module) -> None:
    """Gives every tensor of `model` the device, dtype and strides it has in `reference`, by its name.

    Modules are repaired as their counterparts are. On failure all is as before.
    """
    if isinstance(model, AveragedModel) and not isinstance(reference, AveragedModel):
        model = model.module
    here = {place.path: place for place in named_tensors(model)}
    there = {place.path: place.tensor for place in named_tensors(reference)}
    _check_alike(here, there)
    one_and_the_same: dict[Hashable, dict[str, Tensor]] = {}
    for path, place in here.items():
        one_and_the_same.setdefault(identity(place.tensor), {})[path] = place.tensor
    moves = []
    for places in one_and_the_same.values():
        path, tensor = next(iter(places.items()))
        like = there[path]
        if state(tensor) != state(like):
            tensors = list({id(each): each for each in places.values()}.values())
            moves.append(Move(path, tensors, like.device, like.dtype, _stride(like)))
    snapshot, transfer = Snapshot(model), Transfer(moves)
    try:
        for name, module in model.named_modules():
            _repair_like(module, reference.get_submodule(name))
        transfer.run()
    except BaseException:
        with held_interrupts():
            transfer.undo()
            snapshot.restore()
        raise


def _repair_like(module: nn.Module, reference: nn.Module) -> None:
    for repair in map(find, names()):
        if repair.is_repaired(reference) and repair.fits(module):
            repair.repair(module, {4: "channels_last", 5: "channels_last_3d"})


def _check_alike(here: Mapping[str, NamedTensor], there: Mapping[str, Tensor]) -> None:
    other = sorted(here.keys() ^ there.keys()) or [
        path for path, place in here.items() if place.tensor.shape != there[path].shape
    ]
    if other:
        wrong = "the two models have not the same tensors"
        raise RefusedError(other[0], wrong, "give a copy of the reference, of the same shapes")


def _sides(path: str, now: State, wanted: State) -> list[Drift]:
    names = ("stride", "dtype", "device")
    return [
        Drift(path, name, one, other)
        for name, one, other in zip(names, now, wanted, strict=True)
        if one != other
    ]


def _stride(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if is_strided(tensor) else None


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
