"""Long tables of a page: the first rows as HTML, all others as JSON for the search."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from markupsafe import Markup

from prepare.report.render import short

# More rows than these make a page slow to open on a phone.
LIMIT = 2000
# Cut longer texts in the middle; the search finds only the remaining letters.
_LETTERS = 400


@dataclass(frozen=True, slots=True)
class LongTable:
    """Columns as (title, kind), the first rows as texts, and all others as JSON for the page's script.

    A kind is `name` (the subject of the row), `word` (a status, which has a colour and a filter),
    `code`, `number`, `prose` or `text`. `file` names the file with all rows.
    """

    columns: tuple[tuple[str, str], ...]
    rows: list[list[str]]
    rest: Markup | None
    total: int
    file: str
    links: list[str]


def long_table(
    columns: Iterable[tuple[str, str]],
    rows: Iterable[Sequence[Any]],
    file: str,
    *,
    links: Iterable[str] = (),
) -> LongTable:
    """Return a table; each of `rows` has a value for every column, None for an empty cell.

    `links` are the addresses of the first rows, empty for a row without a page.
    """
    columns = tuple(columns)
    cache: dict[Any, str] = {}
    texts = ([_text(value, cache) for value in row] for row in rows)
    first = list(islice(texts, LIMIT))
    rest, count = _packed(texts, len(columns))
    return LongTable(columns, first, rest, len(first) + count, file, list(islice(links, LIMIT)))


def _packed(rows: Iterable[list[str]], width: int) -> tuple[Markup | None, int]:
    """Return the rows as JSON, and their number: each text once, the cells as indices into the texts.

    Escape `<`, `>` and `&`, as the JSON is part of a page; JSON escapes all letters outside ASCII.
    """
    indices: dict[str, int] = {}
    cells = [indices.setdefault(text, len(indices)) for row in rows for text in row]
    if not cells:
        return None, 0
    data = json.dumps({"texts": list(indices), "cells": cells}, separators=(",", ":"))
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(data), len(cells) // width  # noqa: S704  escaped above


def _text(value: Any, cache: dict[Any, str]) -> str:
    """Return the text of a cell; cached, as most values of a long table repeat."""
    if isinstance(value, list):
        value = tuple(value)
    if value not in cache:
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        cache[value] = "" if text is None else short(text, _LETTERS)
    return cache[value]
