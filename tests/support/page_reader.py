"""A strict reader of pages, and the contrast of colours."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from prepare.app.report import html

TEMPLATES = Path(html.__file__).parent / "templates"


HOSTILE = [
    "</title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a\nb\r\x00\x1b[31m\x0b\u2028",
    "\ud800 and \udc80",
    "n" * 5000,
    "{{ 7 * 7 }} {% raw %}",
    "]]> & &amp; <![CDATA[ --> <!--",
    "=1+1 [red] \u202eabc \u5c42",
    "</style><style>*{display:none}",
]


class Reader(HTMLParser):
    """Read the elements of a page with their attributes in order; reject unbalanced tags."""

    VOID = ("meta", "br", "hr", "img", "link", "input", "path", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        # What only says where a line may break is not part of the text.
        self.feed(re.sub(r'<wbr>|<span class="whole">(.*?)</span>', r"\1", text))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(text for tag, text in self.texts if tag != "style"))


def contrast(first: str, second: str) -> float:
    """Return the contrast of WCAG 2, from 1 to 21; text needs 4.5."""
    bright, dim = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
