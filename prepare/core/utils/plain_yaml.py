"""Read and write YAML as plain data: no value of a document constructs, imports or opens anything.

Tags, anchors, aliases, directives, merge keys, `${`, keys that begin with `_`, duplicate keys and a
second document are errors, each with its line. Unquoted values have the meaning of YAML 1.2's core schema:
`on`, `yes` and `1:30` are strings. A value that has another type on the command line (`010`, `1_000`, `nan`,
`nUll`) is an error; only `0x1f` and `0o17` are integers here and strings there. Numbers are finite, integers
have at most 64 bits. A document has at most 1 MiB and 32 levels.
"""

import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import yaml

from prepare.errors import RecipeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_INTEGERS = range(-(1 << 63), 1 << 64)
_AMBIGUOUS = "means one thing in YAML and another on the command line"

# Only the events of these loaders are used; their constructors never run. libyaml's rejects lone surrogates.
_FAST, _SLOW = getattr(yaml, "CSafeLoader", yaml.SafeLoader), yaml.SafeLoader
_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
# Line breaks of YAML 1.1 only (U+0085, U+2028, U+2029) count as unprintable.
_UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_OTHERWISE = re.compile(
    rf"null|true|false|[-+]?(?:\.?(?:inf|nan)|(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:e[-+]?{_DIGITS})?)",
    re.IGNORECASE,
)

# Strings that are written without quotes: every version of YAML reads them as strings.
_PLAIN = re.compile(r"[A-Za-z][\w.*/-]*(?::[\w.*/-]+)*", re.ASCII)
_QUOTED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan"}
_KINDS = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "a mapping"}


class YamlDocument(NamedTuple):
    """The value of a YAML document, and a function from a path of keys to `file:line`."""

    value: object
    at: Callable[[tuple], str]


def read(text: str | bytes, where: str, *, remedy: str) -> YamlDocument:
    """Read `text`; raise RecipeError with places in the file `where`, and `remedy` if it is empty."""
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    _check_size(data, where)
    try:
        text = data.decode(errors="strict" if isinstance(text, bytes) else "surrogatepass")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{where}:{line}", "is not UTF-8", "save it as UTF-8") from error
    text = text.removeprefix("\ufeff")
    if bad := _UNPRINTABLE.search(text):
        place = f"{where}:{text.count(chr(10), 0, bad.start()) + 1}"
        remedy = "remove it, or escape it in double quotes"
        raise RecipeError(place, f"holds the character U+{ord(bad[0]):04X}", remedy)
    reader = _Reader(text, where)
    return YamlDocument(reader.document(remedy), reader.at)


def write(value: object, where: str) -> str:
    """Return `value` in block style, so that `read` returns exactly `value`; raise RecipeError.

    The error names the path of a value that is not plain data (`steps.half.keep[1]`), or `where` if the
    text is beyond the limits.
    """
    _refuse_unfit(value, ())
    # The Python emitter of PyYAML: libyaml's rejects surrogates, and writes other bytes.
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    _check_size(text.encode(), where)
    _Reader(text, "").document("")
    return text


def _check_size(data: bytes, where: str) -> None:
    if len(data) > MAX_BYTES:
        wrong = f"is larger than {MAX_BYTES:,} bytes"
        raise RecipeError(where, wrong, "use patterns in place of lists of names")


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
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _KINDS.get(type(value)) or f"of type {type(value).__name__}"


class _Reader:
    """Build the value of one YAML document from its events; raise RecipeError for all but data.

    An error names its line in the file `where`, or the path of its key if that is empty.
    """

    def __init__(self, text: str, where: str) -> None:
        # Without escaped backslashes, every backslash that is left begins an escape.
        loader = _SLOW if _SURROGATE.search(text.replace(r"\\", "")) else _FAST
        self.events, self.where = yaml.parse(text, Loader=loader), where
        self.lines: dict[tuple, int] = {}
        self.path: tuple = ()

    def at(self, keys: tuple) -> str:
        """Return `file:line` of a key at the top level or one below; the file alone for others."""
        return f"{self.where}:{self.lines[keys]}" if keys in self.lines else self.where

    def refuse(self, event: yaml.Event, wrong: str, remedy: str) -> NoReturn:
        line = f"{self.where}:{event.start_mark.line + 1}"
        raise RecipeError(line if self.where else dotted(self.path), wrong, remedy)

    def next(self) -> yaml.Event:
        try:
            return next(self.events)
        # PyYAML's own parser lets chr() and int() raise for escapes and versions out of range.
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.where}:{mark.line + 1}" if mark and self.where else self.where
            problem = " ".join(str(getattr(error, "problem", None) or error).split())
            raise RecipeError(where, f"is not YAML: {problem}", "correct it there") from error

    def document(self, remedy: str) -> object:
        self.next()
        start = self.next()
        if isinstance(start, yaml.StreamEndEvent):
            raise RecipeError(self.where, "is empty", remedy)
        if start.version or start.tags:
            self.refuse(start, "holds a directive (%)", "remove it")
        value = self.value(self.next(), ())
        self.next()
        if not isinstance(end := self.next(), yaml.StreamEndEvent):
            self.refuse(end, "holds a second document", "give each recipe a file of its own")
        return value

    def value(self, event: yaml.Event, path: tuple) -> object:
        self.path = path
        self.inspect(event)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event)
        if len(path) >= MAX_DEPTH:
            self.refuse(event, f"is more than {MAX_DEPTH} levels deep", "nest less")
        if isinstance(event, yaml.MappingStartEvent):
            return self.pairs(path)
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
        """Raise RecipeError for aliases, anchors and tags."""
        if isinstance(event, yaml.AliasEvent):
            alias = short_repr("*" + event.anchor)
            self.refuse(event, f"holds the alias {alias}", "repeat the value")
        if event.anchor is not None:
            self.refuse(event, f"holds the anchor {short_repr('&' + event.anchor)}", "remove it")
        if event.tag is not None:
            self.refuse(event, f"holds the tag {short_repr(event.tag)}", "write plain data")

    def scalar(self, event: yaml.ScalarEvent) -> object:
        shown = short_repr(event.value)
        if "${" in event.value:
            self.refuse(event, f"holds '${{' in {shown}", "write the value itself")
        try:
            return event.value if event.style else _scalar(event.value)
        except ValueError as error:
            wrong = f"holds {shown}, which {error}"
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
    """Raise RecipeError with its path for a value that YAML cannot hold as plain data."""
    wrong = "" if value is None or type(value) in _KINDS or type(value) is bool else kind_of(value)
    if type(value) is dict or type(value) is list:
        wrong = f"more than {MAX_DEPTH} levels deep" if len(path) >= MAX_DEPTH else ""
        items = value.items() if type(value) is dict else enumerate(value)
        for key, item in () if wrong else items:
            _refuse_unfit(key, path)
            _refuse_unfit(item, (*path, key))
    elif type(value) is int and value not in _INTEGERS:
        wrong = "a number of more than 64 bits"
    if wrong:
        remedy = "use null, true, false, finite numbers, strings, lists and dicts"
        raise RecipeError(dotted(path), f"is {wrong}", remedy)


def _scalar(text: str) -> object:
    """Return the value of an unquoted scalar; raise ValueError if its meaning is ambiguous."""
    if text in _WORDS:
        return _WORDS[text]
    if _BASED.fullmatch(text) or _INTEGER.fullmatch(text):
        # Python reads no integer of more than 4,300 digits.
        if len(text.lstrip("+-0xo")) > 22 or (number := int(text, 0)) not in _INTEGERS:
            raise ValueError("has more than 64 bits")
        return number
    if _FLOAT.fullmatch(text):
        if not math.isfinite(real := float(text)):
            raise ValueError("is too large a number")
        return real
    if _OTHERWISE.fullmatch(text):
        raise ValueError(_AMBIGUOUS)
    return text


def _key_trouble(key: object) -> str:
    """Return the reason why `key` is not allowed, as Hydra or another YAML reader acts on it; or ""."""
    if isinstance(key, str) and key.startswith("_"):
        return f"holds the key {short_repr(key)}: no key of a recipe begins with '_'"
    return "holds the merge key '<<'" if key == "<<" else ""
