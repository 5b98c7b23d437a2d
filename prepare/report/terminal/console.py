"""The terminal itself: a console that takes names as they are, progress, and a table's lines."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from prepare.core.utils.text import line, printable

if TYPE_CHECKING:
    from rich.table import Table


def console(*, errors: bool = False) -> Console:
    """A console that takes names as they are: `[red]` in one is text, and no colour."""
    file = sys.stderr if errors else sys.stdout
    wide = None if file.isatty() or os.environ.get("COLUMNS") else 100
    return Console(file=file, markup=False, highlight=False, emoji=False, width=wide)


@contextmanager
def stage(what: str, *, after: float = 1.0) -> Iterator[Callable[[str], None]]:
    """Shows what is going on: a spinner in a terminal, else a line once it has taken `after` seconds.

    Gives a function that says more of it, where there is a spinner to say it beside.
    """
    if sys.stderr.isatty():
        # The spinner `line` is plain ASCII; others cannot be shown everywhere.
        with console(errors=True).status(printable(what), spinner="line") as status:
            yield lambda more: status.update(printable(more))
        return
    timer = threading.Timer(after, line, [f"{printable(what)} ..."], {"errors": True})
    timer.daemon = True
    timer.start()
    try:
        yield lambda _: None
    finally:
        timer.cancel()


def show_table(table: Table) -> None:
    """A table, without the spaces that would fill its last column up."""
    out = console()
    with out.capture() as captured:
        out.print(table)
    line("\n".join(row.rstrip() for row in captured.get().splitlines()))
