"""Format sizes, counts, arbitrary names and tables, print lines, and announce what a job does."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

_OUTPUT: ContextVar[TextIO | None] = ContextVar("_OUTPUT", default=None)
# Called with the name of the stage that begins; returns a context that lasts as long as the stage.
Progress = Callable[[str], AbstractContextManager[Any]]


def output() -> TextIO:
    """Return the stream of `line`: stdout, or that of `output_to`."""
    return _OUTPUT.get() or sys.stdout


@contextmanager
def output_to(stream: TextIO) -> Iterator[None]:
    """Within this context, print what is for stdout into `stream`."""
    token = _OUTPUT.set(stream)
    try:
        yield
    finally:
        _OUTPUT.reset(token)


def line(text: str, *, errors: bool = False) -> None:
    """Print one line on stdout or stderr, not wrapped, so that paths can be copied from it."""
    stream = sys.stderr if errors else output()
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        to_nobody(stream)


def to_nobody(stream: TextIO) -> None:
    """Let the reader of a stream go, as in `| head`: what follows is written to nobody, and nothing fails."""
    with Path(os.devnull).open("wb") as nobody:
        os.dup2(nobody.fileno(), stream.fileno())


def size(count: int) -> str:
    """Return a number of bytes with a binary unit: `5.4 MiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} bytes" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def printable(text: Any) -> str:
    """Return `text` as one line for any terminal, with unprintable characters escaped."""
    text = str(text)
    if text.isprintable():
        return text
    letters = (x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)
    return "".join(letters)


def first_line(message: object) -> str:
    """Return the first line of an error or of a text, without colours and the space around the whole."""
    return _COLOURS.sub("", str(message)).strip().partition("\n")[0]


def capitalized(text: str) -> str:
    """Return the text with a capital first letter; `torch_export` and `key=value` stay as they are."""
    return text if {"_", "="} & {*text.partition(" ")[0]} else text[:1].upper() + text[1:]


def counts(numbers: Mapping[str, int], words: Iterable[str]) -> str:
    """Return every word with its count: `18 converted, 0 already`."""
    return ", ".join(f"{numbers.get(word, 0)} {word}" for word in words)


def plural(count: int, word: str) -> str:
    """Return a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    r"""Return the rows as CSV with its line ends, `\r\n`; None is an empty cell.

    A lone surrogate, which UTF-8 cannot encode, is written as `\udc80`.
    """
    stream = io.StringIO(newline="")
    csv.writer(stream).writerows(rows)
    return stream.getvalue().encode("utf-8", "backslashreplace").decode()
