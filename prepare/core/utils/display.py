"""Let a record show itself: one line, the text of the command line, and the section of a page."""

from __future__ import annotations

import importlib
from typing import Any

# The report reads records, so no record imports it: it is looked up when one is shown.
_REPORT = "prepare.report.objects"


class Readable:
    """A record whose `repr` is one line, `str` the table of the command line, and HTML its section."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _shown("one_line", self)

    def __str__(self) -> str:
        return _shown("text", self)

    def _repr_html_(self) -> str | None:
        """Return the section of a page, with its style, for notebooks; None without jinja2."""
        return _shown("html", self)


def _shown(form: str, record: Readable) -> Any:
    return getattr(importlib.import_module(_REPORT), form)(record)
