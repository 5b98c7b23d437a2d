"""Where weights are read from and written to, as the command line checks it before torch is started."""

import os
from pathlib import Path

from prepare.core.utils import files
from prepare.core.utils.suggest import choose, nearest

# What is written under each suffix; what is read is known by its content.
SUFFIXES = {
    ".safetensors": "safetensors",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
}
INDEX = ".index.json"


def beside(path: Path) -> Path:
    """Where the manifest of a file is."""
    return path.with_name(f"{path.name}.json")


def instead(path: Path) -> str:
    """What was likely meant in place of a folder, or of a file that is not there."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no folder {files.printable_path(folder)}"
    there = sorted(each.name for each in folder.iterdir())
    if path.is_dir():
        ours = [name for name in there if name.endswith((*SUFFIXES, INDEX))]
        return (
            f"give one of its files: {', '.join(ours[:5])}" if ours else "give the path of a file"
        )
    close = nearest(path.name, there)
    return f"did you mean {files.printable_path(folder / close[0])}?" if close else ""


def check_readable(text: str) -> None:
    """Raises ValueError(what is wrong, what to do) where there is no file to read."""
    path = Path(text)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise ValueError(f"{files.printable_path(path)} {what}", instead(path))


def check_writable(text: str) -> None:
    """Raises ValueError where a file cannot be written, or where one would be lost."""
    path = Path(text)
    check_suffix(path)
    if os.path.lexists(path):
        raise ValueError(
            f"{files.printable_path(path)} is there already", "move it away, or give another name"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{files.printable_path(path)} cannot be written", instead(path))


def check_suffix(path: Path) -> str:
    """How a file of this suffix is written; ValueError where none is."""
    if path.suffix not in SUFFIXES:
        remedy = choose(path.suffix, SUFFIXES, noun="suffixes")
        raise ValueError(f"{files.printable_path(path)} has no suffix of weights", remedy)
    return SUFFIXES[path.suffix]
