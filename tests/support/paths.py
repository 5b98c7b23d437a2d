"""Folders of the repository, and the module search path of child processes in tests."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
CONF = ROOT / "conf"
RUN = ROOT / "run.py"
SUPPORT = TESTS / "support"
# The shared networks and helpers, which pytest finds by `pythonpath` in pyproject.toml.
SHARED = os.pathsep.join(map(str, (TESTS / "networks", SUPPORT, SUPPORT / "no_network")))
PYTHONPATH = f"{ROOT}{os.pathsep}{SHARED}"
