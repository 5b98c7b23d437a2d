"""Recognise our repairs: classes, methods and hooks that keep the layout and compute what torch's do."""

from __future__ import annotations

from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)
_MARK = "_prepare_repair"


def mark_repair(cls: _Class) -> _Class:
    """Mark `cls` as a repair: a class decorator. Subclasses are not marked."""
    setattr(cls, _MARK, cls)
    return cls


def is_repair(cls: type) -> bool:
    """Return whether `cls` itself was marked with `mark_repair`."""
    return vars(cls).get(_MARK) is cls


def is_repaired(module: Any) -> bool:
    """Return whether the class of `module` is a repair."""
    return is_repair(type(module))
