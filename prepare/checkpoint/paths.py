"""Check the paths of weights, without torch: the command line does so before it imports torch."""

import os
from pathlib import Path

from prepare.core.utils import files
from prepare.core.utils.suggest import choose

# What is read is recognised by its content; this is what is written.
SUFFIX = ".safetensors"
INDEX = ".index.json"
_READ = (SUFFIX, ".pt", ".pth", ".ckpt", ".bin", INDEX)


def instead(path: Path) -> str:
    """Return a remedy for a path that is a folder, or a file that does not exist; empty for a file."""
    if files.is_folder(path):
        weights = sorted(each.name for each in path.iterdir() if each.name.endswith(_READ))[:5]
        return f"give one of its files: {', '.join(weights)}" if weights else "give a file"
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
        remedy = "move it away, or give another name"
        raise ValueError(f"{files.printable_path(path)} is there already", remedy)
    if not path.parent.is_dir():
        raise ValueError(f"{files.printable_path(path)} cannot be written", instead(path))


def check_suffix(path: Path) -> None:
    """Raise ValueError for a suffix other than that of safetensors."""
    if path.suffix != SUFFIX:
        remedy = (
            f"{choose(path.suffix, [SUFFIX])}; torch.save(model.state_dict(), FILE) writes torch's"
        )
        raise ValueError(f"{files.printable_path(path)} has no suffix of weights", remedy)
