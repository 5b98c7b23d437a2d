"""Read and write YAML as plain data: no value of a document constructs, imports or opens anything.

Tags, anchors, aliases, directives, merge keys, `${`, keys that begin with `_`, duplicate keys and a
second document are errors, each with its line. Unquoted values have the meaning of YAML 1.2's core schema:
`on`, `yes` and `1:30` are strings. A value that has another type on the command line (`010`, `1_000`, `nan`,
`nUll`) is an error; only `0x1f` and `0o17` are integers here and strings there. Numbers are finite, integers
have at most 64 bits.

Limits: 1 MiB, 32 levels, 5,000 keys and values. PyYAML's own parser needs up to 3 s for 1 MiB, so it gets a
quarter of that; it is used without libyaml, and for escaped surrogates, which libyaml rejects.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import yaml

from prepare.errors import RecipeError

MAX_BYTES = 1 << 20
_MAX_SLOW = 1 << 18
# Characters times blanks in a row: for each word after such a row, libyaml clears as many bytes.
_MOST_BLANKS = 4_000_000_000
_LONG_ROW = 1_000
_BLANKS = dict.fromkeys(map(ord, "\t\r\n"), " ")
MAX_DEPTH = 32
MAX_VALUES = 5_000
_INTEGERS = range(-(1 << 63), 1 << 64)
AMBIGUOUS = "means one thing in YAML and another on the command line"
_SHORTER = "use patterns in place of lists of names"

# Only the events of these loaders are used; their constructors never run.
_FAST, _SLOW = getattr(yaml, "CSafeLoader", None), yaml.SafeLoader
_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
_DIRECTIVE = re.compile(r"(?:\A|[\r\n])%")

# Line breaks of YAML 1.1 only (U+0085, U+2028, U+2029) count as unprintable.
_UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_OTHER_WORDS = re.compile(r"null|true|false|[-+]?\.?(?:inf|nan)", re.IGNORECASE)
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_NUMBER = re.compile(rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?{_DIGITS})?")
_MOST_DIGITS = 1_000
_ODD_NUMBER = re.compile(r"[-+]?0[0-9]|.*_", re.DOTALL)

# Strings that are written without quotes: every version of YAML reads them as strings.
_PLAIN = re.compile(r"[A-Za-z][\w.*/-]*(?::[\w.*/-]+)*", re.ASCII)
_QUOTED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan"}


class YamlDocument(NamedTuple):
    """The value of a YAML document, and a function from a path of keys to `file:line`."""

    value: object
    at: Callable[[tuple], str]


def read(text: str | bytes, where: str, *, remedy: str) -> YamlDocument:
    """Read `text`; raise RecipeError with places in the file `where`, and `remedy` if it is empty."""
    text = _decoded(text, where).removeprefix("\ufeff")
    loader = _loader_of(text)
    if loader is _SLOW and len(text) > _MAX_SLOW:
        reason = "has escaped surrogates" if _FAST else "libyaml is missing"
        raise RecipeError(where, f"{reason}, and is larger than {_MAX_SLOW:,} characters", _SHORTER)
    if (run := _blanks_in_a_row(text)) * len(text) > _MOST_BLANKS:
        raise RecipeError(where, f"holds {run:,} blanks in a row, or more", "remove them")
    reader = _Reader(yaml.parse(text, Loader=loader), text, where)
    return YamlDocument(reader.document(remedy), reader.at)


def write(value: object, where: str) -> str:
    """Return `value` in block style, so that `read` returns exactly `value`; raise RecipeError.

    The error names the path of a value that is not plain data (`steps.half.keep[1]`), or `where` if the
    text is beyond the limits.
    """
    _refuse_unfit(value, ())
    # The Python emitter of PyYAML: libyaml's rejects surrogates, and writes other bytes.
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    read(text, where, remedy="")
    return text


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


class _Reader:
    """Build the value of one YAML document from its events; raise RecipeError for all but data."""

    def __init__(self, events: Iterator[yaml.Event], text: str, where: str) -> None:
        self.events, self.text, self.where = events, text, where
        self.count = 0
        self.lines: dict[tuple, int] = {}

    def at(self, keys: tuple) -> str:
        """Return `file:line` of a key at the top level or one below; the file alone for others."""
        return f"{self.where}:{self.lines[keys]}" if keys in self.lines else self.where

    def refuse(self, event: yaml.Event, wrong: str, remedy: str) -> NoReturn:
        raise RecipeError(f"{self.where}:{event.start_mark.line + 1}", wrong, remedy)

    def next(self) -> yaml.Event:
        try:
            return next(self.events)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.where}:{mark.line + 1}" if mark else self.where
            problem = " ".join(str(getattr(error, "problem", None) or error).split())
            raise RecipeError(where, f"is not YAML: {problem}", "correct it there") from error
        # PyYAML's own parser lets chr() and int() raise for escapes and versions out of range.
        except (ValueError, OverflowError) as error:
            wrong = "is not YAML: an escape or a version is out of range"
            raise RecipeError(self.where, wrong, "correct it") from error

    def document(self, remedy: str) -> object:
        self.next()
        start = self.next()
        if isinstance(start, yaml.StreamEndEvent):
            raise RecipeError(self.where, "is empty", remedy)
        if _DIRECTIVE.search(self.text[: start.end_mark.index]):
            self.refuse(start, "holds a directive (%)", "remove it")
        value = self.value(self.next(), ())
        self.next()
        if not isinstance(end := self.next(), yaml.StreamEndEvent):
            self.refuse(end, "holds a second document", "give each recipe a file of its own")
        return value

    def value(self, event: yaml.Event, path: tuple) -> object:
        self.inspect(event)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if len(path) >= MAX_DEPTH:
            self.refuse(event, f"is more than {MAX_DEPTH} levels deep", "nest less")
        return self.items(path) if isinstance(event, yaml.SequenceStartEvent) else self.pairs(path)

    def items(self, path: tuple) -> list[object]:
        result: list[object] = []
        while not isinstance(event := self.next(), yaml.SequenceEndEvent):
            result.append(self.value(event, (*path, len(result))))
        return result

    def pairs(self, path: tuple) -> dict[str, object]:
        result: dict[str, object] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            key = self.key(event)
            if key in result:
                wrong = f"holds the key {short_repr(key)} again, first in line {lines[key]}"
                self.refuse(event, wrong, "keep one of them")
            lines[key] = event.start_mark.line + 1
            if len(path) < 2:
                self.lines[(*path, key)] = lines[key]
            result[key] = self.value(self.next(), (*path, key))
        return result

    def key(self, event: yaml.Event) -> str:
        self.inspect(event)
        if not isinstance(event, yaml.ScalarEvent):
            self.refuse(event, "holds a key that is a list or a mapping", "use a string as the key")
        key = self.scalar(event)
        if not isinstance(key, str):
            wrong = f"holds the key {short_repr(event.value)}, which is {kind_of(key)}"
            self.refuse(event, wrong, "put quotes around it")
        if wrong := _key_trouble(key):
            self.refuse(event, wrong, "remove it")
        return key

    def inspect(self, event: yaml.Event) -> None:
        """Raise RecipeError for aliases, anchors, tags, and too many keys and values."""
        if isinstance(event, yaml.AliasEvent):
            self.refuse(
                event, f"holds the alias {short_repr('*' + event.anchor)}", "repeat the value"
            )
        if event.anchor is not None:
            self.refuse(event, f"holds the anchor {short_repr('&' + event.anchor)}", "remove it")
        if event.tag is not None:
            self.refuse(event, f"holds the tag {short_repr(event.tag)}", "write plain data")
        self.count += 1
        if self.count > MAX_VALUES:
            self.refuse(event, f"is past the first {MAX_VALUES:,} keys and values", _SHORTER)

    def scalar(self, event: yaml.ScalarEvent) -> object:
        if "${" in event.value:
            self.refuse(
                event, f"holds '${{' in {short_repr(event.value)}", "write the value itself"
            )
        try:
            return event.value if event.style else _scalar(event.value)
        except ValueError as error:
            wrong = f"holds {short_repr(event.value)}, which {error}"
            self.refuse(event, wrong, "write it another way, or in quotes if it is text")


class _Dumper(yaml.SafeDumper):
    """Write lists indented, and a text in quotes if another reader could take it for something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT001, FBT002
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _QUOTED
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def _refuse_unfit(value: object, path: tuple) -> None:
    """Raise RecipeError with its path for a value that is not plain data."""
    if type(value) in (dict, list) and len(path) >= MAX_DEPTH:
        raise RecipeError(dotted(path), f"is more than {MAX_DEPTH} levels deep", "nest less")
    if type(value) is list:
        for index, item in enumerate(value):
            _refuse_unfit(item, (*path, index))
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise RecipeError(
                    dotted(path), f"holds a key that is {kind_of(key)}", "use strings"
                )
            if wrong := _key_trouble(key):
                raise RecipeError(dotted(path), wrong, "rename it")
            _refuse_unfit_scalar(key, (*path, key))
            _refuse_unfit(item, (*path, key))
    else:
        _refuse_unfit_scalar(value, path)


def _refuse_unfit_scalar(value: object, path: tuple) -> None:
    if type(value) is str and "${" in value:
        wrong = f"holds '${{' in {short_repr(value)}"
    elif type(value) is int and value not in _INTEGERS:
        wrong = "has more than 64 bits"
    elif type(value) is float and not math.isfinite(value):
        wrong = "is not finite"
    elif value is None or type(value) in (bool, str, int, float):
        return
    else:
        wrong = f"is {kind_of(value)}"
    remedy = "use null, true, false, finite numbers, strings, lists and dicts"
    raise RecipeError(dotted(path), wrong, remedy)


def _scalar(text: str) -> object:
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
    # The time of `float` grows with the square of the digits.
    if len(text) > _MOST_DIGITS or not math.isfinite(number := float(text)):
        raise ValueError("is too large a number")
    return number


def _integer(text: str) -> int:
    # Python raises its own ValueError for more than 4,300 decimal digits.
    digits = text[2:].lstrip("0") if text[1:2] in ("o", "x") else text
    if len(digits) > 22 or (number := int(text, 0)) not in _INTEGERS:
        raise ValueError("has more than 64 bits")
    return number


def _key_trouble(key: str) -> str:
    """Return the reason why `key` is not allowed, as Hydra or another YAML reader acts on it; or ""."""
    if key.startswith("_"):
        return f"holds the key {short_repr(key)}: no key of a recipe begins with '_'"
    return "holds the merge key '<<'" if key == "<<" else ""


def _decoded(text: str | bytes, where: str) -> str:
    """Decode a recipe; raise RecipeError if it is too large, not UTF-8, or holds unprintable characters."""
    if len(text if isinstance(text, bytes) else text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise RecipeError(where, f"is larger than {MAX_BYTES:,} bytes", _SHORTER)
    if isinstance(text, bytes):
        data = text
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise RecipeError(f"{where}:{line}", "is not UTF-8", "save it as UTF-8") from error
    if bad := _UNPRINTABLE.search(text, text.startswith("\ufeff")):
        line = text.count("\n", 0, bad.start()) + 1
        wrong = f"holds the character U+{ord(bad[0]):04X}"
        raise RecipeError(f"{where}:{line}", wrong, "remove it, or escape it in double quotes")
    return text


def _blanks_in_a_row(text: str) -> int:
    """Return the length of the longest row of blanks and line ends, within a factor of 2, or 0."""
    text, run = text.translate(_BLANKS), _LONG_ROW
    while " " * run in text:
        run *= 2
    return run // 2 if run > _LONG_ROW else 0


def _loader_of(text: str) -> Any:
    """Return libyaml's loader where it reads this text, else PyYAML's own."""
    # Without escaped backslashes, every backslash that is left begins an escape.
    slow = _FAST is None or _SURROGATE.search(text.replace(r"\\", ""))
    return _SLOW if slow else _FAST
