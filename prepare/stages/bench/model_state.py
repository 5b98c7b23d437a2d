"""Find the models behind the variants of a bench, check that they are independent, and set their modes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType
from typing import Any

from torch import nn

from prepare.core.model.tensors import is_plain, lazy_parameter, named_tensors
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


def set_mode(model: nn.Module, *, train: bool) -> None:
    """Set training or evaluation mode; with `train`, a model in training mode keeps its frozen submodules."""
    if train and model.training:
        return
    # The mode of an exported program is fixed, and setting it raises.
    with contextlib.suppress(NotImplementedError):
        model.train(train)


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
