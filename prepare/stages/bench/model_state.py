"""Find the models behind the variants of a bench, and restore them afterwards."""

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
from prepare.core.model.tensors import (
    inner_data,
    is_plain,
    is_strided,
    named_tensors,
    unregistered_tensors,
)
from prepare.core.utils.signals import held_interrupts
from prepare.errors import RefusedError


def modules_in(call: Callable[..., Any], *, depth: int = 3) -> list[nn.Module]:
    """Return the models that a variant runs: itself, or those that a function, method or partial uses."""
    if isinstance(call, nn.Module):
        return [call]
    modules = {
        id(module): module
        for value in _references(call)
        if isinstance(value, nn.Module) or (depth and _is_code(value))
        for module in modules_in(value, depth=depth - 1)
    }
    return list(modules.values())


def check_independent(variants: Mapping[str, Any]) -> None:
    """Check that no two variants are the same model or share a tensor.

    Raises:
        RefusedError: two variants do, or a model has a lazy parameter and cannot be run.
    """
    owners: dict[object, tuple[str, str]] = {}
    for name, model in variants.items():
        if not isinstance(model, nn.Module):
            continue
        if lazy := lazy_parameter(model):
            message = f"the parameter {lazy} has no shape yet"
            raise RefusedError(f"variant {name!r}", message, "run one forward first")
        for path, key in _identities(model):
            owner, owner_path = owners.setdefault(key, (name, path))
            if owner != name:
                raise _sharing_error(owner, name, owner_path)


@contextmanager
def preserved(model: nn.Module, *, train: bool) -> Iterator[None]:
    """Set training or evaluation mode and remove gradients; restore the model on exit.

    Attributes, hooks, modes, gradients and the values of all tensors are restored: a forward may write
    into buffers (BatchNorm) and parameters (Embedding's max_norm). Their copies are in main memory. With
    `train`, a model that is in training mode keeps the mode of each submodule (frozen BatchNorms).
    """
    snapshot = Snapshot(model)
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    values = _saved_values(model)
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        _set_mode(model, train=train)
        yield
    finally:
        with held_interrupts(), torch.no_grad():
            snapshot.restore()
            # The snapshot does not reach the mode of a scripted module.
            for module, mode in modes:
                if module.training != mode:
                    module.training = mode
            for tensor, alias, copy in values:
                _restore_values(tensor, alias, copy)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _references(call: Any) -> list[Any]:
    """Return the values that a callable refers to, and the items of lists and tuples among them."""
    if isinstance(call, partial):
        values = [call.func, *call.args, *call.keywords.values()]
    elif inspect.ismethod(call):
        owner = call.__self__
        values = [owner] if isinstance(owner, nn.Module) else [call.__func__, *_attributes(owner)]
    elif inspect.isfunction(call):
        # The cell of a name that is not assigned yet is empty, and equals another empty cell.
        cells = [cell.cell_contents for cell in call.__closure__ or () if cell != CellType()]
        names = (name for name in call.__code__.co_names if name in call.__globals__)
        values = [*cells, *(call.__globals__[name] for name in names)]
    else:
        values = _attributes(call)
    lists = (value for value in values if isinstance(value, list | tuple))
    return [*values, *(item for value in lists for item in value)]


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())


def _is_code(value: Any) -> bool:
    return isinstance(value, partial) or inspect.ismethod(value) or inspect.isfunction(value)


def _identities(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what two variants must not share: the model itself, and the memory of each tensor."""
    yield "", id(model)
    for place in named_tensors(model):
        tensor = place.tensor
        memory = tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0
        yield place.path, (str(tensor.device), memory) if memory else id(tensor)


def _sharing_error(first: str, second: str, path: str) -> RefusedError:
    shared = f"share the tensor {path}" if path else "are the same model"
    return RefusedError(
        f"variants {first!r} and {second!r}",
        f"they {shared}: preparing one changes the other",
        "build the model once for each, or copy.deepcopy it before it is prepared; "
        "to call one model in two ways, give a function for each",
    )


def _set_mode(model: nn.Module, *, train: bool) -> None:
    if train and model.training:
        return
    # The mode of an exported program is fixed, and setting it raises.
    with contextlib.suppress(NotImplementedError):
        model.train(train)


def _saved_values(model: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return each tensor once, with an alias of its memory and a copy of its values."""
    registered = [place.tensor for place in named_tensors(model)]
    unregistered = [tensor for _, tensor in unregistered_tensors(model)]
    distinct = {id(tensor): tensor for tensor in (*registered, *unregistered)}.values()
    with_values = (
        tensor
        for tensor in distinct
        # torchao cannot compare quantized weights, and no forward or backward writes into them.
        if is_strided(tensor) and not tensor.is_meta and not inner_data(tensor)
    )
    return [
        (tensor, tensor.detach(), tensor.detach().to("cpu", copy=True)) for tensor in with_values
    ]


def _restore_values(tensor: Tensor, alias: Tensor, copy: Tensor) -> None:
    if is_plain(tensor) and _memory_of(tensor) != _memory_of(alias):
        tensor.data = alias
    # Only if the values differ: a write would invalidate a graph whose backward has yet to run.
    if not torch.equal(alias.to("cpu"), copy):
        alias.copy_(copy)


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), *bits
