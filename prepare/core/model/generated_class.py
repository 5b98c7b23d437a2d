"""Classes that are made while the program runs, and are pickled by the function that makes them."""

import copyreg
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

_MADE_BY = "_prepare_made_by"


def make_class(
    name: str,
    bases: tuple[Any, ...],
    members: Mapping[str, Any],
    by: Callable[..., Any],
    *args: Any,
) -> Any:
    """Return a class like the first of `bases`; a pickle of it calls `by(*args)`, which makes it again."""
    kind: Any = type(bases[0])  # a class is hashable, which mypy denies
    return _metaclass(kind)(name, bases, {**members, _MADE_BY: (by, args)})


def made_of(cls: type) -> tuple[Any, ...]:
    """Return the arguments with which `cls` itself was made; nothing for another class."""
    return vars(cls).get(_MADE_BY, (None, ()))[1]


@cache
def _metaclass(kind: Any) -> Any:
    """Return a metaclass, a subclass of `kind`, whose classes are pickled by what makes them."""
    made = type.__new__(type(kind), kind.__name__, (kind,), {})
    copyreg.pickle(made, _reduce)
    return made


def _reduce(cls: type) -> Any:
    return vars(cls).get(_MADE_BY) or cls.__qualname__
