"""A table of a page that can be long: its first rows stand in it, the others lie beside it for a search."""

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
# Longer names are cut in the middle; a search finds what stands in so many letters.
_KEPT = 400


@dataclass(frozen=True, slots=True)
class Grid:
    """Columns as (title, kind), the first rows as texts, and all others as JSON for the page's script.

    A kind is `name` (what the row is about), `word` (a status, which gives it its colour and can be
    filtered by), `code`, `number`, `prose` or `text`. `file` names the file that has all rows.
    """

    columns: tuple[tuple[str, str], ...]
    rows: list[list[str]]
    rest: Markup | None
    total: int
    file: str
    links: list[str]


def grid(
    columns: Iterable[tuple[str, str]],
    rows: Iterable[Sequence[Any]],
    file: str,
    *,
    links: Iterable[str] = (),
) -> Grid:
    """The table with these columns; `rows` holds a value for each of them, None for an empty cell.

    `links` are addresses of what the first rows are about, empty for those that have none.
    """
    columns = tuple(columns)
    known: dict[Any, str] = {}
    texts = ([_text(value, known) for value in row] for row in rows)
    first = list(islice(texts, LIMIT))
    rest, count = _packed(texts, len(columns))
    return Grid(columns, first, rest, len(first) + count, file, list(islice(links, LIMIT)))


def _packed(rows: Iterable[list[str]], width: int) -> tuple[Markup | None, int]:
    """The rows as JSON, and how many: each text once, and the cells as places in the list of texts.

    In a page, so no `<` and no `&` may stand in it; all else that is not ASCII is escaped as well.
    """
    places: dict[str, int] = {}
    cells = [places.setdefault(text, len(places)) for row in rows for text in row]
    if not cells:
        return None, 0
    data = json.dumps({"texts": list(places), "cells": cells}, separators=(",", ":"))
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(data), len(cells) // width  # noqa: S704  no sign of HTML is left in it


def _text(value: Any, known: dict[Any, str]) -> str:
    """What a cell shows; most values of a long table come again and again."""
    if value not in known:
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        known[value] = "" if text is None else short(text, _KEPT)
    return known[value]
