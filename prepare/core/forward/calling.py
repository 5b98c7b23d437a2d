"""A model whose call runs another of its methods: the decoder of an autoencoder."""

from __future__ import annotations

import inspect
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

from prepare.core.model.replaced_method import make_class
from prepare.core.utils.suggest import choose, nearest
from prepare.core.utils.wording import words
from prepare.errors import ConfigError


def calling(model: nn.Module, method: str) -> nn.Module:
    """Return a view of `model` whose call runs `method`: `calling(vae, "decode")(latents)`.

    It shares everything with the model (modules, tensors, hooks, mode), and every name in it is the
    model's. Prepare the model itself; then predict, verify, time or export a view of it.

    Raises:
        ConfigError: the model's class has no such method; the error names the nearest ones.
    """
    view: nn.Module = object.__new__(class_calling(type(model), method))
    object.__setattr__(view, "__dict__", vars(model))
    return view


def class_calling(cls: type[nn.Module], method: str) -> type[nn.Module]:
    """Return a subclass of `cls` with its name, whose `forward` is `method`; the same class each time.

    Raises:
        ConfigError: `cls` has no such method; the error names the nearest ones.
    """
    if method == "forward":
        return cls
    if not inspect.isfunction(getattr(cls, str(method), None)):
        inherited = (name for name in dir(cls) if not hasattr(nn.Module, name))
        names = [*nearest(method, inherited), *(n for n in vars(cls) if not n.startswith("_"))]
        methods = [name for name in dict.fromkeys(names) if inspect.isfunction(getattr(cls, name))]
        wrong = f"{cls.__name__} has no method {str(method)!r}"
        where = words(cli="model.method", python="method")
        raise ConfigError(where, wrong, choose(method, methods or ["forward"], noun="methods"))
    made_of: Any = cls  # a class is hashable, which mypy denies
    return _subclass(made_of, method)


@cache
def _subclass(cls: Any, method: str) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method)(
            *args, **kwargs
        )  # looked up by its name: a step may replace the method

    forward.__signature__ = inspect.signature(getattr(cls, method))  # type: ignore[attr-defined]
    members = {"forward": _First(forward), "__module__": cls.__module__, "__doc__": cls.__doc__}
    members["__qualname__"] = cls.__qualname__
    return make_class(cls.__name__, (cls,), members, class_calling, cls, method)


class _First:
    """A function of a class that comes before what a step has put on the module under this name."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __get__(self, module: Any, _: Any = None) -> Any:
        return self._function if module is None else MethodType(self._function, module)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["forward"] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)["forward"]
