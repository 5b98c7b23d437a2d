"""Copy a model with everything that `copy.deepcopy` loses: modes, hooks, shared memory, computed weights."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.model.tensors import is_plain, named_tensors, with_bits_of
from prepare.core.utils.text import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The tables of every module: parameters, buffers, children, hooks.
_TABLES = tuple(key for key, value in vars(nn.Module()).items() if isinstance(value, dict | set))


class CopyError(Exception):
    """The model cannot be copied; the message says why."""


def deep_copy(model: nn.Module) -> nn.Module:
    """Return an independent copy of a model, without gradients.

    Unlike `copy.deepcopy`, it keeps the mode, hooks and attributes of modules that pickle only a part of
    their state (einops' layers call `__init__` again), the gradient hooks and attributes of parameters,
    and memory that a parameter shares with other tensors. It copies a weight that a hook computes, as the
    old `torch.nn.utils.weight_norm` does.

    Raises:
        CopyError: a part cannot be copied, or a function in the model refers to the model itself, so
            that the copy would compute with the original's tensors.
    """
    if name := _borrowing_function(model):
        raise CopyError(f"{name} is a function that refers to the model itself")
    memo: dict[int, Any] = {}
    for _, tensor in _tensors(model):
        if tensor.requires_grad and not tensor.is_leaf:
            memo[id(tensor)] = tensor.detach().clone()
    try:
        duplicate = copy.deepcopy(model, memo)
        copies = dict(duplicate.named_modules(remove_duplicate=False))
        for name, module in model.named_modules(remove_duplicate=False):
            if name in copies and not isinstance(module, torch.jit.ScriptModule):
                _complete(module, copies[name], memo)
        _share_memory(model, memo)
    except Exception as error:
        raise CopyError(f"{type(error).__name__}: {first_line(error)}") from error
    for parameter in duplicate.parameters():
        parameter.grad = None
    return duplicate


def copy_or_build(model: nn.Module, build: Callable[[], nn.Module] | None = None) -> nn.Module:
    """Return a copy of a model or, if it cannot be copied, a second model from `build` that equals it.

    Raises:
        CopyError: it cannot be copied, and there is no `build`, or what it returns differs.
    """
    try:
        return deep_copy(model)
    except CopyError:
        if build is None:
            raise
        duplicate = build()
        if name := _first_difference(model, duplicate):
            raise CopyError(f"{name} differs in a second model from the same function") from None
        modes = {name: module.training for name, module in model.named_modules()}
        for name, module in duplicate.named_modules():
            module.training = modes[name]
        return duplicate


def _first_difference(model: nn.Module, duplicate: nn.Module) -> str:
    """Return the name of the first module or tensor that differs; empty if the models are equal."""
    originals, copies = (dict(each.named_modules()) for each in (model, duplicate))
    for name in dict.fromkeys((*originals, *copies)):
        if type(originals.get(name)) is not type(copies.get(name)):
            return name or "the class"
    tensors, others = (
        {item.path: item.tensor for item in named_tensors(each)} for each in (model, duplicate)
    )
    for path in dict.fromkeys((*tensors, *others)):
        tensor, other = tensors.get(path), others.get(path)
        if tensor is None or other is None or tensor is other or not _is_same(tensor, other):
            return path
    return ""


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.device != other.device:
        return False
    return not is_plain(tensor) or torch.equal(tensor.nan_to_num(), other.nan_to_num())


def _complete(module: nn.Module, duplicate: nn.Module, memo: dict[int, Any]) -> None:
    """Add to the copy of one module what its class did not copy."""
    for key, value in vars(module).items():
        if key not in vars(duplicate):
            vars(duplicate)[key] = copy.deepcopy(value, memo)
        elif key in _TABLES and isinstance(value, dict):
            _complete_table(value, vars(duplicate)[key], memo)
        elif key in _TABLES and isinstance(value, set):
            vars(duplicate)[key] |= value
    duplicate.training = module.training
    for name, parameter in module._parameters.items():
        if parameter is not None and (other := duplicate._parameters.get(name)) is not None:
            _complete_parameter(parameter, other)


def _complete_table(table: dict[Any, Any], copied: dict[Any, Any], memo: dict[int, Any]) -> None:
    for key, value in table.items():
        # A class that calls `__init__` again has drawn other values.
        drawn_again = isinstance(value, Tensor) and id(value) not in memo
        if key not in copied or drawn_again:
            copied[key] = copy.deepcopy(value, memo)


def _complete_parameter(parameter: nn.Parameter, duplicate: nn.Parameter) -> None:
    """Copy attributes and gradient hooks; not hooks after accumulation, where an optimizer may step."""
    for key, value in vars(parameter).items():
        vars(duplicate).setdefault(key, value)
    if not duplicate._backward_hooks:
        for hook in (parameter._backward_hooks or {}).values():
            duplicate.register_hook(hook)


def _share_memory(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let the copies of tensors that share memory with a parameter share memory too."""
    groups: dict[int, dict[int, Tensor]] = {}
    for _, tensor in _tensors(model):
        if is_plain(tensor) and tensor.numel():
            address = tensor.untyped_storage().data_ptr()
            groups.setdefault(address, {})[id(tensor)] = tensor
    for address, group in groups.items():
        has_parameter = any(isinstance(tensor, nn.Parameter) for tensor in group.values())
        if not address or len(group) == 1 or not has_parameter:
            continue
        storage = next(iter(group.values())).untyped_storage().clone()
        for key, tensor in group.items():
            if isinstance(duplicate := memo.get(key), Tensor):
                view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                place = tensor.storage_offset(), tensor.shape, tensor.stride()
                duplicate.data = with_bits_of(tensor, view.set_(storage, *place))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and every tensor among the parameters, buffers and attributes of all modules."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for table in (module._parameters, module._buffers, vars(module)):
            for key, value in table.items():
                for item in value if type(value) is list else (value,):
                    if isinstance(item, Tensor):
                        yield f"{name}.{key}", item


def _borrowing_function(model: nn.Module) -> str:
    """Return the place of a function that holds a module or tensor of the model; empty if none does."""
    held = {id(module) for module in model.modules()} | {id(t) for _, t in _tensors(model)}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for key, value in vars(module).items():
            functions = value.values() if isinstance(value, dict) else (value,)
            if key != "_compiled_call_impl" and any(
                id(item) in held
                for function in functions
                if isinstance(function, FunctionType)
                for item in _kept(function)
            ):
                return f"{name}.{key}".lstrip(".")
    return ""


def _kept(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function keeps: its defaults and the variables around it."""
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue
