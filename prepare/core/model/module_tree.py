"""Copy a model or its tree of modules, record and restore it, or hash its structure."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from prepare.core.model.module_kinds import replaced_methods
from prepare.core.model.tensors import (
    is_plain,
    is_strided,
    named_modules,
    named_tensors,
    with_bits_of,
)
from prepare.core.utils.text import first_line

# A subclass may not allow changes or copies (diffusers' configurations are frozen dictionaries).
_REFILLED = (dict, OrderedDict, list, set)
_COPIED_FROM: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def copy_tree(
    module: nn.Module,
    tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    _copied: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Copy every module, with `tensor` applied to every parameter and buffer; share everything else.

    Modules and hooks of the copy can be changed without an effect on the original. By default the
    copy holds the same tensor objects. A function on an instance, as one that is there in place of
    `forward`, is bound to the copy if it is a method, or a `functools.partial` with the module.
    """
    copied = {} if _copied is None else _copied
    if id(module) in copied:
        return copied[id(module)]
    copied[id(module)] = clone = object.__new__(type(module))
    clone.__dict__.update(
        (key, value.copy() if type(value) in _REFILLED else value)
        for key, value in vars(module).items()
    )
    tables: tuple[dict[str, Any], ...] = (clone._parameters, clone._buffers)
    for table in tables:
        table.update((name, tensor(held)) for name, held in table.items() if held is not None)
    for name, method in replaced_methods(clone):
        vars(clone)[name] = method.bound_to(clone)
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = copy_tree(child, tensor, _copied=copied)
    if "forward" in vars(clone):
        _COPIED_FROM[clone] = source_of(module)
        vars(clone).update((key, _bound_to(value, copied)) for key, value in vars(clone).items())
    return clone


def source_of(module: nn.Module) -> nn.Module:
    """Return the module with a `forward` of its own of which this one is a copy, or the module itself."""
    return _COPIED_FROM.get(module, module)


def _bound_to(value: Any, copied: dict[int, nn.Module]) -> Any:
    """Return a function on an instance for the copies of the modules to which it is bound."""
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _bound_to(value.__self__, copied))
    if type(value) is partial:
        args = (_bound_to(each, copied) for each in value.args)
        again = partial(_bound_to(value.func, copied), *args, **value.keywords)
        vars(again).update(vars(value))
        return again
    return copied.get(id(value), value) if isinstance(value, nn.Module) else value


def clone_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor without its graph, as a Parameter if it is one: for `copy_tree`."""
    copied = tensor.detach().clone()
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied


def remove_hooks(module: nn.Module, *kinds: type) -> None:
    """Remove the forward hooks and pre-hooks of these classes from `module` itself."""
    flags = (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
    for table in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(table.items()):
            if isinstance(hook, kinds):
                for each in (table, *flags):
                    each.pop(key, None)


class Snapshot:
    """The class, attributes, children and hooks of every module of a model; not the values of tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, type(module), _attributes(module)) for module in model.modules()]

    def restore(self) -> None:
        """Restore every recorded module, and keep the identity of its tables of hooks."""
        for module, cls, attributes in self._modules:
            if type(module) is not cls:
                module.__class__ = cls
            vars(module).clear()
            for key, (value, content) in attributes.items():
                if content is not None:
                    _refill(value, content)
                vars(module)[key] = value


def structure(model: nn.Module) -> str:
    """Return the sha256 (hexadecimal) of the structure of a model, independent of its values.

    It covers every module's name, class and `extra_repr` (sizes, strides, groups), and every
    tensor's name, shape, strides, dtype and device type.

    >>> structure(nn.Conv2d(2, 2, 3)) == structure(nn.Conv2d(2, 2, 3))
    True
    >>> structure(nn.Conv2d(2, 2, 3)) == structure(nn.Conv2d(2, 2, 3, padding=1))
    False
    """
    lines = [
        f"{name!r} {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()}"
        for name, module in named_modules(model)
    ]
    for place in sorted(named_tensors(model), key=lambda place: place.path):
        tensor = place.tensor
        strides = tensor.stride() if is_strided(tensor) else tensor.layout
        kind = f"{tensor.dtype} {tensor.device.type} {tensor.requires_grad}"
        shape = "nested" if tensor.is_nested else tuple(tensor.shape)
        lines.append(f"{place.path!r} {shape} {strides} {kind}")
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {
        key: (value, value.copy() if type(value) in _REFILLED else None)
        for key, value in vars(module).items()
    }


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


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
