"""Read and write YAML as plain data: no value of a document constructs, imports or opens anything.

Tags, anchors, aliases, directives, merge keys, `${`, keys that begin with `_`, duplicate keys and a
second document are errors, each with its line. Unquoted values have the meaning of YAML 1.2's core schema:
`on`, `yes` and `1:30` are strings. A value that has another type on the command line, or for another reader
(`010`, `0x1f`, `1_000`, `nan`, `nUll`), is an error. Numbers are finite, integers have at most 64 bits. A
document has at most 1 MiB and 32 levels.
"""

import math
import re
from typing import Any, NoReturn

import yaml

from prepare.errors import RecipeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_INTEGERS = range(-(1 << 63), 1 << 64)

# Only the events of this loader are used; its constructors never run.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
# What else some reader takes for a number or a word of YAML.
_OTHERWISE = re.compile(
    r"null|true|false|0[xo]\w+|[-+]?\.?(?:inf|nan|[0-9][0-9._]*(?:e[-+]?[0-9_]+)?)", re.IGNORECASE
)

# Strings that are written without quotes: every version of YAML reads them as strings.
_PLAIN = re.compile(r"[A-Za-z][\w.*/-]*(?::[\w.*/-]+)*", re.ASCII)
_QUOTED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan"}
_KINDS = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "a mapping"}


def read(text: str | bytes, where: str, *, remedy: str) -> "YamlDocument":
    """Read `text`; raise RecipeError with places in the file `where`, and `remedy` if it is empty."""
    data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
    _check_size(data, where)
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RecipeError(f"{where}:{line}", "is not UTF-8", "save it as UTF-8") from error
    return YamlDocument(text, where, remedy)


def write(value: object, where: str) -> str:
    """Return `value` in block style, so that `read` returns exactly `value`; raise RecipeError.

    The error names the path of a value that `read` refuses (`steps.half.keep[1]`), or `where`.
    """
    # The Python emitter of PyYAML: libyaml's writes other bytes.
    try:
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)
    except (yaml.YAMLError, ValueError, RecursionError):
        text = ""
    _check_size(text.encode(), where)
    if not text or YamlDocument(text, "", "").value != value:
        remedy = "use null, true, false, finite numbers, strings, lists and dicts"
        raise RecipeError(where, "holds what is not plain data", remedy)
    return text


def _check_size(data: bytes, where: str) -> None:
    if len(data) > MAX_BYTES:
        wrong = f"is larger than {MAX_BYTES:,} bytes"
        raise RecipeError(where, wrong, "use patterns in place of lists of names")


def dotted(path: tuple[str | int, ...]) -> str:
    """Return `("steps", "half", "keep", 1)` as `steps.half.keep[1]`, with unusual keys in quotes."""
    text = ""
    for key in path:
        simple = isinstance(key, str) and _PLAIN.fullmatch(key) and len(key) <= 60
        text += f"[{key}]" if isinstance(key, int) else f".{key if simple else short_repr(key)}"
    return text.removeprefix(".")


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


class YamlDocument:
    """The `value` of one YAML document, built from its nodes; raises RecipeError for all but data.

    An error names its line in the file `where`, or the path of its key if that is empty.
    """

    def __init__(self, text: str, where: str, remedy: str) -> None:
        self._where, self._lines = where, dict[tuple, int]()
        self._events = yaml.parse(text, Loader=_LOADER)
        try:
            next(self._events)  # the beginning of the stream
            if isinstance(start := next(self._events), yaml.StreamEndEvent):
                raise RecipeError(where, "is empty", remedy)
            if start.version or start.tags:
                self._refuse(start, "holds a directive (%)", "remove it")
            self.value = self._read(next(self._events), ())
            next(self._events)  # the end of the document
            if not isinstance(more := next(self._events), yaml.StreamEndEvent):
                self._refuse(more, "holds a second document", "give each recipe a file of its own")
        # PyYAML's own parser lets chr() and int() raise for escapes and versions out of range.
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            mark = getattr(error, "problem_mark", None)
            place = f"{where}:{mark.line + 1}" if mark and where else where
            problem = " ".join(str(getattr(error, "problem", None) or error).split())
            raise RecipeError(place, f"is not YAML: {problem}", "correct it there") from error

    def at(self, keys: tuple) -> str:
        """Return `file:line` of a key at the top level or one below; the file alone for others."""
        return f"{self._where}:{self._lines[keys]}" if keys in self._lines else self._where

    def _refuse(self, found: Any, wrong: str, remedy: str, path: tuple = ()) -> NoReturn:
        line = f"{self._where}:{found.start_mark.line + 1}"
        raise RecipeError(line if self._where else dotted(path), wrong, remedy)

    def _read(self, event: Any, path: tuple) -> object:
        """Return the value that begins with this event."""
        if event.anchor:
            kind, sign = ("alias", "*") if isinstance(event, yaml.AliasEvent) else ("anchor", "&")
            wrong = f"holds the {kind} {short_repr(sign + event.anchor)}"
            self._refuse(event, wrong, "write the value itself", path)
        if event.tag:
            self._refuse(event, f"holds the tag {short_repr(event.tag)}", "write plain data")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if len(path) >= MAX_DEPTH:
            self._refuse(event, f"is more than {MAX_DEPTH} levels deep", "nest less", path)
        if isinstance(event, yaml.SequenceStartEvent):
            items = list[object]()
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._read(item, (*path, len(items))))
            return items
        result, lines = dict[str, object](), dict[str, int]()
        while not isinstance(item := next(self._events), yaml.MappingEndEvent):
            key = self._key(item, path, lines)
            result[key] = self._read(next(self._events), (*path, key))
        return result

    def _scalar(self, event: Any, path: tuple) -> object:
        shown = short_repr(event.value)
        if "${" in event.value:
            self._refuse(event, f"holds '${{' in {shown}", "write the value itself", path)
        try:
            return event.value if event.style else _plain_value(event.value)
        except ValueError as error:
            remedy = "write it another way, or in quotes if it is text"
            self._refuse(event, f"holds {shown}, which {error}", remedy, path)

    def _key(self, event: Any, path: tuple, lines: dict[str, int]) -> str:
        if isinstance(event, yaml.CollectionStartEvent):
            wrong = "holds a key that is a list or a mapping"
            self._refuse(event, wrong, "use a string as the key", path)
        key = self._read(event, path)
        wrong = f"holds the key {short_repr(event.value)}"
        if not isinstance(key, str):
            self._refuse(event, f"{wrong}, which is {kind_of(key)}", "put quotes around it", path)
        # Hydra or another YAML reader acts on such keys.
        if key == "<<" or key.startswith("_"):
            wrong += ", which is a merge key or begins with '_'"
            self._refuse(event, wrong, "remove it", path)
        if key in lines:
            wrong += f" again, first in line {lines[key]}"
            self._refuse(event, wrong, "keep one of them", path)
        lines[key] = event.start_mark.line + 1
        if len(path) < 2:
            self._lines[(*path, key)] = lines[key]
        return key


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


def _plain_value(text: str) -> object:
    """Return the value of an unquoted scalar; raise ValueError if its meaning is ambiguous."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        # Python reads no integer of more than 4,300 digits.
        if len(text) > 22 or (number := int(text)) not in _INTEGERS:
            raise ValueError("has more than 64 bits")
        return number
    if _FLOAT.fullmatch(text):
        if not math.isfinite(real := float(text)):
            raise ValueError("is too large a number")
        return real
    if _OTHERWISE.fullmatch(text):
        raise ValueError("means one thing in YAML and another on the command line")
    return text
