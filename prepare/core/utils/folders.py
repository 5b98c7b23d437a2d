"""Find the folder of configurations, and that in which `prepare` remembers answers between processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def conf_dir() -> Path:
    """Return the folder of configurations: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def cache_folder(name: str) -> Path:
    """Return `prepare/NAME` in the system's folder for caches; it may not exist."""
    home = Path("~").expanduser()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        cache = Path(folder)
    elif sys.platform == "darwin":
        cache = home / "Library" / "Caches"
    elif sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        cache = home / ".cache"
    return cache / "prepare" / name
