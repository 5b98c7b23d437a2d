"""Render templates; escape all values and keep only printable text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from prepare.core.utils.text import capitalized, printable

# A number with an exponent, and the places where a long name may break: `steps.repair_layout`.
_NUMBER = re.compile(r"\b\d+(?:\.\d+)?e[-+]\d+\b")
_BREAK = re.compile(r"(?<=[a-z_])[.=](?=[a-z_])")
_FOLDER = Path(__file__).parent / "templates"


def render(template: str, **context: Any) -> str:
    """Render one template of this package; values of `context` are escaped."""
    return _environment().get_template(template).render(context)


def load_templates() -> None:
    """Compile every template, for processes that are forked from this one."""
    for name in _environment().list_templates(["html"]):
        _environment().get_template(name)


def template_text(name: str) -> str:
    """Return the text of a file of the template folder."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def printable_value(value: Any) -> Any:
    """Return what a template prints of a value: nothing for None, only printable letters of a text.

    XML and UTF-8 cannot hold control characters and lone surrogates. Line ends stay.
    """
    if isinstance(value, Markup):
        return value
    if isinstance(value, str) and not value.isprintable():
        return "\n".join(map(printable, value.splitlines()))
    return "" if value is None else value


def short(value: Any, limit: int = 120) -> str:
    """Return a text of at most `limit` letters; leave out whole words in its middle if it is longer."""
    text = printable(str(value)[: 4 * limit] + str(value)[4 * limit :][-limit:])
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[limit * 2 // 3 + 1 - limit :]
    # A name without spaces is cut where the room ends.
    if (at := head.rfind(" ")) > len(head) // 2:
        head = head[: at + 1]
    if 0 <= (at := tail.find(" ")) < len(tail) // 2:
        tail = tail[at:]
    return f"{head}…{tail}"


def breakable(text: str) -> Markup:
    """Return a text that may break after a dot or `=` in a name, and not within a number."""
    marked = _BREAK.sub(r"\g<0><wbr>", str(escape(printable(text))))
    return Markup(_NUMBER.sub(r'<span class="whole">\g<0></span>', marked))  # noqa: S704  escaped above


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        finalize=printable_value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "breakable": breakable,
        "count": lambda number: f"{number:,}",
        "capitalized": capitalized,
        "short": short,
    }
    return environment
