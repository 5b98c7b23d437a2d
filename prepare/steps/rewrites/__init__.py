"""The rewrites of the step rewrite_conv: `REWRITES` of each file, one for each exact identity."""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def all_rewrites() -> dict[str, Any]:
    """Return all rewrites by their names; those that need no example last, as they serve the fewest calls."""
    files = (import_module(f"{__name__}.{file}") for file in ("frames", "products"))
    found = (rewrite for file in files for rewrite in file.REWRITES)
    return {
        each.name: each for each in sorted(found, key=lambda each: (each.never_loses, each.name))
    }


def find_rewrite(name: str) -> Any:
    """Return the rewrite of that name."""
    return all_rewrites()[name]
