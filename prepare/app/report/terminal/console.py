"""The console, a spinner for slow stages, and tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from prepare.core.utils.text import output, printable

if TYPE_CHECKING:
    from rich.table import Table


def console(*, errors: bool = False) -> Console:
    """Return a console that prints `[red]` in a name as text, not as a colour."""
    file = sys.stderr if errors else output()
    width = None if has_width(file) else 100
    return Console(file=file, markup=False, highlight=False, emoji=False, width=width)


def has_width(file: TextIO) -> bool:
    """Return whether lines have a limit: that of a terminal, or of the variable `COLUMNS`."""
    return file.isatty() or bool(os.environ.get("COLUMNS"))


@contextmanager
def stage(what: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner in a terminal until the stage ends, and nothing in a pipe.

    Yield a function that replaces the text beside the spinner.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # The spinner `line` is plain ASCII; others cannot be shown everywhere.
    with console(errors=True).status(printable(what), spinner="line") as status:
        yield lambda text: status.update(printable(text))


def table_lines(table: Table, *, width: int | None = None) -> list[str]:
    """Return the lines of a table without trailing spaces, in `width` letters if that is given."""
    terminal = console()
    terminal.width = width or terminal.width
    with terminal.capture() as captured:
        terminal.print(table)
    return [row.rstrip() for row in captured.get().splitlines()]
