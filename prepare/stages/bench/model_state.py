"""Find the models behind the variants of a bench, check that they are independent, and set their modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from prepare.core.model.tensors import is_plain, lazy_parameter, named_tensors
from prepare.errors import RefusedError

_SHARED = "preparing one changes the other"
_SEPARATE = (
    "build the model once for each, or copy.deepcopy it before it is prepared; "
    "to call one model in two ways, give a function for each"
)


def modules_in(call: Callable[..., Any], *, depth: int = 3) -> list[nn.Module]:
    """Return the models that a variant runs: itself, or those that a function, method or partial uses."""
    if isinstance(call, nn.Module):
        return [call]
    modules = {
        id(module): module
        for value in _references(call)
        if isinstance(value, nn.Module)
        or (depth and isinstance(value, partial | MethodType | FunctionType))
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
                shared = f"share the tensor {owner_path}" if owner_path else "are the same model"
                raise RefusedError(
                    f"variants {owner!r} and {name!r}", f"they {shared}: {_SHARED}", _SEPARATE
                )


def set_mode(model: nn.Module, *, train: bool) -> None:
    """Set training or evaluation mode; with `train`, a model in training mode keeps its frozen submodules."""
    if not (train and model.training):
        model.train(train)


def _references(call: Any) -> list[Any]:
    """Return the values that a callable refers to, and the items of lists and tuples among them."""
    values = [*getattr(call, "__dict__", {}).values()]
    if isinstance(call, partial):
        values += [call.func, *call.args, *call.keywords.values()]
    elif isinstance(call, MethodType):
        owner = call.__self__
        values = [owner] if isinstance(owner, nn.Module) else [call.__func__, *vars(owner).values()]
    elif isinstance(call, FunctionType):
        # The cell of a name that is not assigned yet is empty, and equals another empty cell.
        values += [cell.cell_contents for cell in call.__closure__ or () if cell != CellType()]
        names = (name for name in call.__code__.co_names if name in call.__globals__)
        values += [call.__globals__[name] for name in names]
    lists = (value for value in values if isinstance(value, list | tuple))
    return [*values, *(item for value in lists for item in value)]


def _identities(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what two variants must not share: the model itself, and the memory of each tensor."""
    yield "", id(model)
    for place in named_tensors(model):
        tensor = place.tensor
        memory = tensor.untyped_storage().data_ptr() if is_plain(tensor) else 0
        yield place.path, (str(tensor.device), memory) if memory else id(tensor)
