"""Find the folder of configurations, in a checkout and in an installed package."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """Return the folder of configurations: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
