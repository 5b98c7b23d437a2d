"""Find the folder of the system in which `prepare` remembers answers between processes."""

import os
import sys
from pathlib import Path


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
