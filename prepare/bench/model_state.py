"""Finds the models behind the variants of a bench, and leaves them as they were."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.forward.stand_ins import lazy_parameter
from prepare.core.model.module_tree import Snapshot
from prepare.core.model.tensors import is_plain, is_strided, named_tensors, unregistered_tensors
from prepare.core.utils.signals import held_interrupts
from prepare.errors import RefusedError


def modules_in(call: Callable[..., Any], *, depth: int = 3) -> list[nn.Module]:
    """The models that a variant runs: itself, or what a function, method or partial refers to."""
    if isinstance(call, nn.Module):
        return [call]
    found = {
        id(module): module
        for value in _refers_to(call)
        if isinstance(value, nn.Module) or (depth and _is_code(value))
        for module in modules_in(value, depth=depth - 1)
    }
    return list(found.values())


def check_apart(variants: Mapping[str, Any]) -> None:
    """Raises RefusedError where two models are one, hold one tensor, or cannot be run as they are."""
    owners: dict[object, tuple[str, str]] = {}
    for name, model in variants.items():
        if not isinstance(model, nn.Module):
            continue
        if lazy := lazy_parameter(model):
            wrong = f"the parameter {lazy} has no shape yet"
            raise RefusedError(f"variant {name!r}", wrong, "run one forward first")
        for path, key in _keys(model):
            other, where = owners.setdefault(key, (name, path))
            if other != name:
                _refuse_shared(other, name, where)


@contextmanager
def kept(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Within, the model is in training or evaluation mode and has no gradients; then it is as it was.

    That holds for attributes, hooks, modes, gradients, and the values of all tensors: a forward may
    write into buffers (BatchNorm) and parameters (Embedding's max_norm). Their copies wait in main
    memory. A model in training mode keeps the mode of each of its parts (frozen BatchNorms).
    """
    snapshot = Snapshot(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    values = _values(model)
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        _set_mode(model, train=train)
        yield
    finally:
        with held_interrupts(), torch.no_grad():
            snapshot.restore()
            # A scripted module keeps its mode out of the snapshot's reach.
            for module, mode in modes:
                if module.training != mode:
                    module.training = mode
            for tensor, alias, copy in values:
                _put_back(tensor, alias, copy)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _refers_to(call: Any) -> list[Any]:
    if isinstance(call, partial):
        found = [call.func, *call.args, *call.keywords.values()]
    elif inspect.ismethod(call):
        owner = call.__self__
        found = [owner] if isinstance(owner, nn.Module) else [call.__func__, *_attributes(owner)]
    elif inspect.isfunction(call):
        # An empty cell, of a name that is not set yet, equals another.
        cells = [cell.cell_contents for cell in call.__closure__ or () if cell != CellType()]
        names = (name for name in call.__code__.co_names if name in call.__globals__)
        found = [*cells, *(call.__globals__[name] for name in names)]
    else:
        found = _attributes(call)
    lists = (value for value in found if isinstance(value, list | tuple))
    return [*found, *(item for value in lists for item in value)]


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _is_code(value: Any) -> bool:
    return isinstance(value, partial) or inspect.ismethod(value) or inspect.isfunction(value)


def _keys(model: nn.Module) -> Iterator[tuple[str, object]]:
    """The model itself, and the memory of each tensor: what no two variants may have in common."""
    yield "", id(model)
    for place in named_tensors(model):
        tensor = place.tensor
        memory = tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0
        yield place.path, (str(tensor.device), memory) if memory else id(tensor)


def _refuse_shared(one: str, other: str, path: str) -> None:
    what = f"hold one tensor, {path}" if path else "are one and the same model"
    raise RefusedError(
        f"variants {one!r} and {other!r}",
        f"they {what}: what prepares one changes the other",
        "build the model once for each, or copy.deepcopy it before it is prepared; "
        "to call one model in two ways, give a function for each",
    )


def _set_mode(model: nn.Module, *, train: bool) -> None:
    if train and model.training:
        return
    # An exported program has its mode built in, and says so in this way.
    with contextlib.suppress(NotImplementedError):
        model.train(train)


def _values(model: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every tensor once, an alias of its memory, and a copy of its values."""
    named = [place.tensor for place in named_tensors(model)]
    loose = [tensor for _, tensor in unregistered_tensors(model)]
    found = {id(tensor): tensor for tensor in (*named, *loose)}.values()
    held = (tensor for tensor in found if is_strided(tensor) and not tensor.is_meta)
    return [(tensor, tensor.detach(), tensor.detach().to("cpu", copy=True)) for tensor in held]


def _put_back(tensor: Tensor, alias: Tensor, copy: Tensor) -> None:
    if is_plain(tensor) and _lies(tensor) != _lies(alias):
        tensor.data = alias
    # Not always: to write would spoil a graph of the user's that has yet to go backward.
    if not torch.equal(alias.to("cpu"), copy):
        alias.copy_(copy)


def _lies(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
