"""The repairs of the step repair_layout: one file for each, which holds its `REPAIR`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def repair_names() -> list[str]:
    """Every repair there is, by its file's name."""
    files = (found.name for found in iter_modules(__path__))
    return sorted(name for name in files if name != "base" and not name.startswith("_"))


def find_repair(name: str) -> Any:
    """The repair of that name."""
    return import_module(f"{__name__}.{name}").REPAIR
