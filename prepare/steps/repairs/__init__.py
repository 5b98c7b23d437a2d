"""The repairs of the step repair_layout: one file for each kind of module, with its `REPAIR`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

_SHARED = {"base", "swap_class"}


def repair_names() -> list[str]:
    """Return the names of all repairs, which are the names of their files."""
    files = (module.name for module in iter_modules(__path__))
    return sorted(name for name in files if name not in _SHARED and not name.startswith("_"))


def find_repair(name: str) -> Any:
    """Return the repair of that name."""
    return import_module(f"{__name__}.{name}").REPAIR
