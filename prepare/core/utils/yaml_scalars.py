"""Read and write YAML scalars, and describe values in messages.

Unquoted values have the meaning of YAML 1.2's core schema: `on`, `yes` and `1:30` are strings. A value
that has another type on the command line (`010`, `1_000`, `nan`, `nUll`) is an error; only `0x1f` and
`0o17` are integers here and strings there. Numbers are finite, integers have at most 64 bits.
"""

import json
import math
import re

INTEGERS = range(-(1 << 63), 1 << 64)
AMBIGUOUS = "means one thing in YAML and another on the command line"

# Line breaks of YAML 1.1 only (U+0085, U+2028, U+2029) count as unprintable.
UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_OTHER_WORDS = re.compile(r"null|true|false|[-+]?\.?(?:inf|nan)", re.IGNORECASE)
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?{_DIGITS})?")
_ODD_NUMBER = re.compile(r"[-+]?0[0-9]|.*_", re.DOTALL)

# Strings that are written without quotes: every version of YAML reads them as strings.
_PLAIN = re.compile(r"[A-Za-z][\w.*/-]*(?::[\w.*/-]+)*", re.ASCII)
_QUOTED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan"}


def read(text: str) -> object:
    """Return the value of an unquoted scalar; raise ValueError if its meaning is ambiguous."""
    if text in _WORDS:
        return _WORDS[text]
    if _OTHER_WORDS.fullmatch(text):
        raise ValueError(AMBIGUOUS)
    if _BASED.fullmatch(text):
        return _integer(text)
    if not _NUMBER.fullmatch(text):
        return text
    if _ODD_NUMBER.match(text):
        raise ValueError(AMBIGUOUS)
    if text.lstrip("+-").isdecimal():
        return _integer(text)
    if not math.isfinite(number := float(text)):
        raise ValueError("is too large a number")
    return number


def write(value: object) -> str:
    """Return the text of a value on one line; raise ValueError if it is not plain data.

    Dicts and lists must be empty.
    """
    if value is None or type(value) in (bool, dict, list):
        return json.dumps(value)
    if type(value) is str and "${" not in value:
        plain = _PLAIN.fullmatch(value) and value.lower() not in _QUOTED
        return value if plain else _quoted(value)
    if type(value) is int and value in INTEGERS:
        return str(value)
    if type(value) is float and math.isfinite(value):
        # YAML 1.1 reads 1e-05 as a string.
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")
    raise ValueError(_why_unfit(value))


def key_trouble(key: str) -> str:
    """Return the reason why `key` is not allowed, as Hydra or another YAML reader acts on it; or ""."""
    if key.startswith("_"):
        return f"holds the key {short_repr(key)}: no key of a recipe begins with '_'"
    return "holds the merge key '<<'" if key == "<<" else ""


def dotted(path: tuple[str | int, ...]) -> str:
    """Return `("steps", "half", "keep", 1)` as `steps.half.keep[1]`, with unusual keys in quotes."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            simple = _PLAIN.fullmatch(key) and len(key) <= 60
            text += "." * bool(text) + (key if simple else short_repr(key))
    return text


def short_repr(value: object) -> str:
    """Return a value as one short line; a cut string ends in `...`."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else ascii(value[:60]) + "..."
    return kind_of(value) if isinstance(value, dict | list | tuple) else ascii(value)[:60]


def kind_of(value: object) -> str:
    """Return the kind of a value in words: `null`, `a list`, `of type set`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "a mapping"}
    return kinds.get(type(value)) or f"of type {type(value).__name__}"


def _integer(text: str) -> int:
    # Python raises its own ValueError for more than 4,300 decimal digits.
    digits = text[2:].lstrip("0") if text[1:2] in ("o", "x") else text
    if len(digits) > 22 or (number := int(text, 0)) not in INTEGERS:
        raise ValueError("has more than 64 bits")
    return number


def _why_unfit(value: object) -> str:
    if type(value) is str:
        return f"holds '${{' in {short_repr(value)}"
    if type(value) is int:
        return "has more than 64 bits"
    return "is not finite" if type(value) is float else f"is {kind_of(value)}"


def _quoted(text: str) -> str:
    """Return `text` in double quotes; JSON's escapes mean the same in YAML, except for surrogate pairs."""
    escaped = json.dumps(text, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda bad: f"\\u{ord(bad[0]):04x}", escaped)
