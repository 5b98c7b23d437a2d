"""Copy the module tree of a model without its tensors, or record and restore it."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

# A subclass may not allow changes or copies (diffusers' configurations are frozen dictionaries).
_REFILLED = (dict, OrderedDict, list, set)


def copy_tree(
    module: nn.Module,
    tensor: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    *,
    _copied: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Copy every module, with `tensor` applied to every parameter and buffer; share everything else.

    Modules and hooks of the copy can be changed without an effect on the original. By default the
    copy holds the same tensor objects.
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
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = copy_tree(child, tensor, _copied=copied)
    return clone


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
