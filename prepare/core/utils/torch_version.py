"""Refuse a torch that is too old."""

import re
from importlib import metadata

from prepare.errors import ConfigError

LEAST = (2, 5)


def check_torch(version: str | None = None) -> None:
    """Raise ConfigError if `version` of torch is too old; without one, ask for that of the installed torch.

    Imports no torch.
    """
    try:
        version = version or metadata.version("torch")
    except metadata.PackageNotFoundError:
        return
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST:
        wrong = f"prepare needs torch {'.'.join(map(str, LEAST))} or newer, and this is {version}"
        raise ConfigError("", wrong, "pip install -U torch")
