"""Names of a package that are imported when they are asked for: `import` of the package stays cheap."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_names(package: str, **modules: tuple[str, ...]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: each module of it, with the names that it holds."""
    homes = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return load
