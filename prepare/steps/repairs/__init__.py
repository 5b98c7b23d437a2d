"""The repairs of the step repair_layout and the rewrites of the step rewrite_conv, by their names."""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def all_repairs() -> dict[str, Any]:
    """Return all repairs by their names, sorted."""
    files = (import_module(f"{__name__}.{file}") for file in ("convolutions", "norms", "pooling"))
    named = {repair.name: repair for file in files for repair in file.REPAIRS}
    return dict(sorted(named.items()))


@cache
def all_rewrites() -> dict[str, Any]:
    """Return all rewrites by their names; those that need no example last, as they serve the fewest calls."""
    found = import_module(f"{__name__}.rewrites").REWRITES
    return {
        each.name: each for each in sorted(found, key=lambda each: (each.never_loses, each.name))
    }


def find_repair(name: str) -> Any:
    """Return the repair of that name."""
    return all_repairs()[name]


def find_rewrite(name: str) -> Any:
    """Return the rewrite of that name."""
    return all_rewrites()[name]
