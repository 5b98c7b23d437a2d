"""Shorten labels to the width of a picture."""

from __future__ import annotations

import unicodedata

from prepare.core.utils.text import printable


def cut(text: str, room: float) -> str:
    """Shorten a text to a width of `room` letters; leave its middle out. Wide letters count twice."""
    text = printable(text[:6000])
    if width_of(text) <= room:
        return text
    head, tail = "", ""
    for letter in text:
        if width_of(head + letter) > room * 0.6 - 1:
            break
        head += letter
    for letter in reversed(text):
        if width_of(head) + width_of(tail + letter) > room - 1:
            break
        tail = letter + tail
    return f"{head}…{tail}"


def width_of(text: str) -> int:
    """Return the width of a text in letters; those of East Asian scripts count twice."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
