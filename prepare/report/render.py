"""Templates to text: everything put into one is escaped, and is text that any reader can take."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from prepare.core.utils.text import plural, printable, size

_FOLDER = Path(__file__).parent / "templates"


def render(template: str, **context: Any) -> str:
    """One template of this package; whatever stands in `context` cannot break out of its place."""
    return _environment().get_template(template).render(context)


def load_templates() -> None:
    """Compiles every template, so that a copy of this process need not."""
    for name in _environment().list_templates(["html"]):
        _environment().get_template(name)


def template_text(name: str) -> str:
    """A file beside the templates, as it is."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def shown(value: Any) -> Any:
    """What a template shows of a value: nothing for None, and only what is printable of a text.

    Control characters and halves of surrogate pairs are in no XML and no UTF-8; line ends stay.
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, str) and not value.isprintable():
        return "\n".join(map(printable, value.splitlines()))
    return "" if value is None else value


def short(value: Any, limit: int = 120) -> str:
    """A name or a text in no more than `limit` letters, its middle left out."""
    text = printable(str(value)[: 4 * limit] + str(value)[4 * limit :][-limit:])
    head = limit * 2 // 3
    return text if len(text) <= limit else f"{text[:head]}…{text[head + 1 - limit :]}"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "bytes": size,
        "count": lambda number: f"{number:,}",
        "listed": lambda values: ", ".join(map(str, values or ())),
        "plural": plural,
        "short": short,
    }
    return environment
