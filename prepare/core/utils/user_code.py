"""Describe an error with the line of the user's code that raised it."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

from prepare.core.utils.text import first_line

# Packages whose lines do not show what the user's code, or the network of another package, did.
_INNER = ("torch", "hydra", "omegaconf", "prepare")
# Folders of installed packages.
_INSTALLED = ("site-packages", "dist-packages")
# Letters of a message that is given whole.
_MOST = 300
_OURS = Path(__file__).resolve().parents[2]


def described(error: BaseException, message: str | None = None) -> str:
    """Return `my_nets.py:8, in forward: ValueError: message`; without the line if there is none to name.

    `message` replaces that of the error, of which a long one gives its first line. The error that caused it
    follows, the last of the chain.
    """
    if message is None:
        # The message of a SyntaxError repeats the line.
        message = str(error.msg) if isinstance(error, SyntaxError) else _short_text(error)
    kind, cause = type(error).__name__, causes(error)[-1]
    text = raised_at(error) + (f"{kind}: {message}" if message else kind)
    last = _short_text(cause)
    is_new = cause is not error and last and last not in message
    return f"{text}; caused by {type(cause).__name__}: {last}" if is_new else text


def causes(error: BaseException, *, contexts: bool = False) -> list[BaseException]:
    """Return an error and the chain of its causes, and of its `contexts` too; a circle ends."""
    chain = [error]
    while cause := chain[-1].__cause__ or (chain[-1].__context__ if contexts else None):
        if cause in chain:
            break
        chain.append(cause)
    return chain


def raised_at(error: BaseException) -> str:
    """Return `my_nets.py:8, in forward: `, or nothing."""
    place = place_of(error)
    return f"{place}: " if place else ""


def place_of(error: BaseException) -> str:
    """Return `my_nets.py:8, in forward`, the innermost line outside of libraries, or nothing.

    If every line is in a library, it is the innermost one outside of torch and of this package.
    """
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{_shown(error.filename)}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_file()]
    own = [frame for frame in frames if _library(frame.filename) is None]
    theirs = [f for f in frames if (name := _library(f.filename)) and name not in _INNER]
    for frame in (own or theirs)[-1:]:
        function = "" if frame.name == "<module>" else f", in {frame.name}"
        return f"{_shown(frame.filename)}:{frame.lineno}{function}"
    return ""


def _short_text(error: BaseException) -> str:
    """Return the message of an error in one line, or the first line of a long message."""
    whole = " ".join(str(error).split())
    return whole if len(whole) <= _MOST else first_line(error)


def _library(filename: str) -> str | None:
    """Return the package that holds the file, `` for the standard library, None for the user's code."""
    path = Path(filename)
    if path.is_relative_to(_OURS):
        return "prepare"
    for folder in path.parents:
        if folder.name in _INSTALLED:
            return path.relative_to(folder).parts[0]
    return "" if path.is_relative_to(sysconfig.get_path("stdlib")) else None


def _shown(filename: str) -> str:
    """Return the path from the current folder, else from the folder that it was imported from."""
    path = Path(filename)
    installed = [folder for folder in path.parents if folder.name in _INSTALLED]
    imported = map(Path, sorted(filter(None, sys.path), key=len, reverse=True))
    for folder in (*installed, Path.cwd(), *imported):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return filename


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the CPU or a device; torch has several messages for it."""
    if isinstance(error, MemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
