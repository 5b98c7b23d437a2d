"""The repairs of the step repair_layout: `REPAIRS` of each file, by their names."""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def all_repairs() -> dict[str, Any]:
    """Return all repairs by their names, sorted."""
    files = (import_module(f"{__name__}.{file}") for file in ("convolutions", "norms", "pooling"))
    named = {repair.name: repair for file in files for repair in file.REPAIRS}
    return dict(sorted(named.items()))


def find_repair(name: str) -> Any:
    """Return the repair of that name."""
    return all_repairs()[name]
