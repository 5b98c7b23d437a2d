"""Install an example package of tests/ into a folder of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import TESTS


def installed(name: str, folder: Path) -> Path:
    """Install the package in `tests/name` by pip; return the folder to put on the module search path."""
    pytest.importorskip("setuptools")
    shutil.copytree(TESTS / name, folder / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(folder / "site"), str(folder / "source")], check=True)
    return folder / "site"
