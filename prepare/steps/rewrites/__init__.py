"""The rewrites of the step rewrite_conv: one file for each exact identity, with its `REWRITE`."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def rewrite_names() -> list[str]:
    """Return the names of all rewrites, which are the names of their files."""
    files = (module.name for module in iter_modules(__path__))
    return sorted(name for name in files if name != "base" and not name.startswith("_"))


def find_rewrite(name: str) -> Any:
    """Return the rewrite of that name."""
    return import_module(f"{__name__}.{name}").REWRITE
