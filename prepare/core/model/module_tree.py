"""Copy a model or its tree of modules, or record and restore it."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from prepare.core.model.module_kinds import replaced_methods
from prepare.core.model.tensors import is_plain, named_tensors
from prepare.core.utils.text import first_line

# The classes whose methods read and write a container: a subclass may refuse changes, as diffusers' frozen
# configurations do. An OrderedDict has an order of its own, which the methods of dict do not keep.
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
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
        (key, value.copy() if type(value) in CONTAINERS else value)
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


def called_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return by name what a program calls: the model, or the networks in one without a forward.

    An `nn.ModuleDict` has none, and an autoencoder that only encodes and decodes.
    """
    if is_called(model):
        return {"": model}
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        inner = called_modules(child).items()
        found |= {f"{name}.{below}".rstrip("."): module for below, module in inner}
    return found


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward: an `nn.ModuleList` has none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


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
        self._classes = [(module, type(module)) for module in model.modules()]
        tables = [vars(module) for module, _ in self._classes]
        inner = [v for table in tables for v in table.values() if type(v) in CONTAINERS]
        self._contents = [(each, content_of(each)) for each in (*tables, *inner)]

    def restore(self) -> None:
        """Restore every recorded module, and keep the identity of its tables of hooks."""
        for module, cls in self._classes:
            if type(module) is not cls:
                module.__class__ = cls
        for container, content in self._contents:
            refill(container, content)


def content_of(container: Any) -> dict[Any, Any]:
    """Return what a container of one of CONTAINERS holds, by its keys or positions."""
    base = _base(type(container))  # type: ignore[arg-type]
    is_dict = issubclass(base, dict)
    return dict(base.items(container) if is_dict else enumerate(base.__iter__(container)))


def refill(container: Any, content: dict[Any, Any]) -> None:
    """Put `content` back into a container, unless it holds just these objects."""
    now = content_of(container)
    if same(now, content) and same(now.values(), content.values()):
        return
    base = _base(type(container))  # type: ignore[arg-type]
    base.clear(container)
    if issubclass(base, dict):
        for key, value in content.items():
            base.__setitem__(container, key, value)
    else:
        (base.update if base is set else base.extend)(container, content.values())


def same(first: Collection[Any], second: Collection[Any]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


@cache
def _base(kind: Any) -> Any:
    return next(base for base in CONTAINERS if issubclass(kind, base))


class CopyError(Exception):
    """The model cannot be copied; the message says why."""


def deep_copy(model: nn.Module) -> nn.Module:
    """Return an independent copy of a model, without gradients.

    Unlike `copy.deepcopy`, it asks no class how it is pickled: modules keep their mode, hooks and attributes
    (einops' layers call `__init__` again), parameters their gradient hooks and attributes. A weight that a
    hook computes, as the old `torch.nn.utils.weight_norm` does, is copied as a value.

    Raises:
        CopyError: a part cannot be copied, or a function in the model refers to the model itself, so
            that the copy would compute with the original's tensors.
    """
    if name := _borrowing_function(model):
        raise CopyError(f"{name} is a function that refers to the model itself")
    computed = (each for each in _tensors(model) if each.requires_grad and not each.is_leaf)
    memo: dict[int, Any] = {id(each): each.detach().clone() for each in computed}
    # torch copies the graph of a scripted module, and compiles a compiled one again.
    modules = [each for each in model.modules() if not _is_torchs_to_copy(each)]
    memo |= {id(module): object.__new__(type(module)) for module in modules}
    try:
        for module in reversed(modules):  # from the inside out
            for key, value in vars(module).items():
                vars(memo[id(module)])[key] = copy.deepcopy(value, memo)
        duplicate: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise CopyError(f"{type(error).__name__}: {first_line(error)}") from error
    for original, copied in zip(model.parameters(), duplicate.parameters(), strict=True):
        copied.grad = None
        vars(copied).update({**vars(original), **vars(copied)})
        # Not hooks after accumulation, where an optimizer may step.
        for hook in (original._backward_hooks or {}).values():
            copied.register_hook(hook)
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
    kinds, others = (dict(each.named_modules()) for each in (model, duplicate))
    for name in {**kinds, **others}:
        if type(kinds.get(name)) is not type(others.get(name)):
            return name or "the class"
    values, others = ({t.path: t.tensor for t in named_tensors(m)} for m in (model, duplicate))
    for path in {**values, **others}:
        value, other = values.get(path), others.get(path)
        if value is None or other is None or value is other or value.dtype != other.dtype:
            return path
        if is_plain(value) and not torch.equal(value.nan_to_num(), other.nan_to_num()):
            return path
    return ""


def _is_torchs_to_copy(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor among the parameters, buffers and attributes of all modules."""
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):
            for table in (module._parameters, module._buffers, vars(module)):
                for value in table.values():
                    items = value if type(value) is list else (value,)
                    yield from (item for item in items if isinstance(item, Tensor))


def _borrowing_function(model: nn.Module) -> str:
    """Return the place of a function that holds a module or tensor of the model; empty if none does."""
    held = {*map(id, model.modules()), *map(id, _tensors(model))}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if not isinstance(each, FunctionType) or key == "_compiled_call_impl":
                    continue
                kept = (*(each.__defaults__ or ()), *gc.get_referents(*(each.__closure__ or ())))
                if not held.isdisjoint(map(id, kept)):
                    return f"{name}.{key}".lstrip(".")
    return ""
