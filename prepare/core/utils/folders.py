"""Find, name and make the folders of `prepare`, and lock one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from prepare.core.utils.suggest import meant

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # typeshed has no None for a missing module

# The groups of configurations, each a folder of `conf_dir`, whose options add steps.
STEP_GROUPS = ("device", "precision", "memfmt")


def conf_dir() -> Path:
    """Return the folder of configurations: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def own_name(group: str, option: Any) -> Any:
    """Return the name of the file of an option in a group of steps: `bfloat16` for `bf16`."""
    if group not in STEP_GROUPS or not isinstance(option, str):
        return option
    return meant(option, (file.stem for file in (conf_dir() / group).glob("*.yaml"))) or option


def run_name(model: str | None, overrides: Iterable[str]) -> str:
    """Return what names the folder of a run: its model, or the class that `model._target_=` names."""
    targets = [word for word in map(str, overrides) if word.startswith("model._target_=")]
    given = targets[-1].rpartition("=")[2].rpartition(".")[2] if targets else "run"
    name = given if model in (None, "custom") else str(model)
    return re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[:60].strip("-") or "run"


def new_folder(base: Path) -> Path:
    """Make a folder, by one process only; one that is there already gets a number behind its name."""
    folder, number = base, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
        else:
            return folder


@contextmanager
def hold_folder(folder: Path) -> Iterator[bool]:
    """Lock an existing folder within the block; yield False if another process of this machine has.

    This leaves no file in it. Without such locks (Windows, some network folders) it always yields True.
    """
    with ExitStack() as stack:
        held = True
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            try:
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = False
        yield held
