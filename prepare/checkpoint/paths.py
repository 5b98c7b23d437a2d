"""Check the paths of weights, without torch: the command line does so before it imports torch."""

import os
from pathlib import Path

from prepare.core.utils import files
from prepare.core.utils.suggest import choose

# The format that is written for each suffix; a file that is read is recognised by its content.
SUFFIXES = {".safetensors": "safetensors", **dict.fromkeys((".pt", ".pth", ".ckpt"), "torch")}
# Suffixes of files that are read: `.bin` names no format, and other libraries expect their own in it.
_READ = (*SUFFIXES, ".bin")
INDEX = ".index.json"


def beside(path: Path) -> Path:
    """Return the path of the manifest of a file."""
    return path.with_name(f"{path.name}.json")


def instead(path: Path) -> str:
    """Return a remedy for a path that is a folder, or a file that does not exist."""
    if files.is_folder(path):
        there = sorted(each.name for each in path.iterdir())
        weights = [name for name in there if name.endswith((*_READ, INDEX))][:5]
        return (
            f"give one of its files: {', '.join(weights)}" if weights else "give the path of a file"
        )
    return "" if os.path.lexists(path) else files.missing_remedy(path)


def check_readable(text: str) -> None:
    """Raise ValueError(what is wrong, what to do) if the path is not a file."""
    path = Path(text)
    if not files.is_file(path):
        what = "is not a regular file" if os.path.lexists(path) else "is not there"
        what = "is a folder" if files.is_folder(path) else what
        raise ValueError(f"{files.printable_path(path)} {what}", instead(path))


def check_writable(text: str) -> None:
    """Raise ValueError if a file cannot be written, or one would be overwritten."""
    path = Path(text)
    check_suffix(path)
    if os.path.lexists(path):
        raise ValueError(
            f"{files.printable_path(path)} is there already", "move it away, or give another name"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{files.printable_path(path)} cannot be written", instead(path))


def check_suffix(path: Path) -> str:
    """Return the format that is written for this suffix; raise ValueError for an unknown one."""
    if path.suffix not in SUFFIXES:
        remedy = choose(path.suffix, SUFFIXES, noun="suffixes")
        raise ValueError(f"{files.printable_path(path)} has no suffix of weights", remedy)
    return SUFFIXES[path.suffix]
