"""The values of plain data that hold no others: read from text, written as text, and named in messages.

Values without quotes mean what YAML 1.2's core schema says: `on`, `yes` and `1:30` are strings. Any
that the command line would take for another type (`010`, `1_000`, `nan`, `nUll`) is refused; only
`0x1f` and `0o17` are integers here and text there. Numbers are finite, integers have at most 64
bits.
"""

import json
import math
import re

INTEGERS = range(-(1 << 63), 1 << 64)
AMBIGUOUS = "means one thing in YAML and another on the command line"

# The breaks of YAML 1.1 that are none in 1.2 (U+0085, U+2028, U+2029) count as unprintable.
UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)

_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_OTHER_WORDS = re.compile(r"null|true|false|[-+]?\.?(?:inf|nan)", re.IGNORECASE)
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?{_DIGITS})?")
_ODD_NUMBER = re.compile(r"[-+]?0[0-9]|.*_", re.DOTALL)

# What is written without quotes: only what every version of YAML reads as a string.
_PLAIN = re.compile(r"[A-Za-z][\w.*/-]*(?::[\w.*/-]+)*", re.ASCII)
_QUOTED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan"}


def read(text: str) -> object:
    """The value of a scalar without quotes; a ValueError says why it has none that is certain."""
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
    """The text of a value, on one line; a ValueError says why there is none.

    Of dicts and lists only the empty ones have such a text.
    """
    kind = type(value)
    if value is None or kind in (bool, dict, list):
        return json.dumps(value)
    if kind is str and "${" not in value:
        plain = _PLAIN.fullmatch(value) and value.lower() not in _QUOTED
        return value if plain else _quoted(value)
    if kind is int and value in INTEGERS:
        return str(value)
    if kind is float and math.isfinite(value):
        # YAML 1.1 reads 1e-05 as a string.
        return repr(value) if "." in repr(value) else repr(value).replace("e", ".0e")
    raise ValueError(_why_unfit(value))


def key_trouble(key: str) -> str:
    """Why no key of a recipe may be `key`: what other readers of YAML or Hydra would act on."""
    if key.startswith("_"):
        return f"holds the key {short_repr(key)}: no key of a recipe begins with '_'"
    return "holds the merge key '<<'" if key == "<<" else ""


def dotted(path: tuple) -> str:
    """`("steps", "half", "keep", 1)` as `steps.half.keep[1]`; odd keys in quotes."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            simple = _PLAIN.fullmatch(key) and len(key) <= 60
            text += "." * bool(text) + (key if simple else short_repr(key))
    return text


def short_repr(value: object) -> str:
    """A value as one short line; a cut string shows that it is one."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else ascii(value[:60]) + "..."
    return kind_of(value) if isinstance(value, dict | list | tuple) else ascii(value)[:60]


def kind_of(value: object) -> str:
    """What a value is, in a word or two: `null`, `a list`, `of type set`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "a mapping"}
    return kinds.get(type(value)) or f"of type {type(value).__name__}"


def _integer(text: str) -> int:
    # Python refuses to convert more than 4,300 decimal digits, with a ValueError of its own.
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
    """In double quotes; JSON's escapes mean the same in YAML, but for pairs of surrogates."""
    escaped = json.dumps(text, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda bad: f"\\u{ord(bad[0]):04x}", escaped)
