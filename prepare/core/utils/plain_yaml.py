"""Read and write YAML as plain data: no value of a document constructs, imports or opens anything.

Tags, anchors, aliases, directives, merge keys, `${`, keys that begin with `_`, duplicate keys and a
second document are errors, each with its line. `yaml_scalars` defines the meaning of single values.

Limits: 1 MiB, 32 levels, 5,000 keys and values. PyYAML's own parser needs up to 3 s for that; it is used
without libyaml, and for escaped surrogates, which libyaml rejects.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import yaml

from prepare.core.utils import yaml_scalars as scalars
from prepare.core.utils.yaml_scalars import UNPRINTABLE, dotted, key_trouble, kind_of, short_repr
from prepare.errors import RecipeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 5_000
SHORTER = "use patterns in place of lists of names"

# Only the events of these loaders are used; their constructors never run.
_FAST, _SLOW = getattr(yaml, "CSafeLoader", None), yaml.SafeLoader
_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
_DIRECTIVE = re.compile(r"(?:\A|[\r\n])%")
_MAX_SIMPLE_KEY = 1000


class YamlDocument(NamedTuple):
    """The value of a YAML document, and a function from a path of keys to `file:line`."""

    value: object
    at: Callable[[tuple], str]


def read(text: str | bytes, where: str, *, remedy: str) -> YamlDocument:
    """Read `text`; raise RecipeError with places in the file `where`, and `remedy` if it is empty."""
    _check_size(text, where)
    text = _decoded(text, where).removeprefix("\ufeff")
    reader = _Reader(yaml.parse(text, Loader=_loader_of(text)), text, where)
    return YamlDocument(reader.document(remedy), reader.at)


def write(value: object, where: str) -> str:
    """Return `value` in block style, so that `read` returns exactly `value`; raise RecipeError.

    The error names the path of a value that is not plain data (`steps.half.keep[1]`), or `where`
    if the whole text is too large.
    """
    writer = _Writer()
    writer.value(value, (), head="", pad="")
    text = "\n".join(writer.lines) + "\n"
    _check_size(text, where, verb="would be")
    return text


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
        if wrong := key_trouble(key):
            self.refuse(event, wrong, "remove it")
        return key

    def inspect(self, event: yaml.Event) -> None:
        """Raise RecipeError for aliases, anchors, tags, and more than MAX_VALUES keys and values."""
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
            self.refuse(event, f"is past the first {MAX_VALUES:,} keys and values", SHORTER)

    def scalar(self, event: yaml.ScalarEvent) -> object:
        if "${" in event.value:
            self.refuse(
                event, f"holds '${{' in {short_repr(event.value)}", "write the value itself"
            )
        try:
            return event.value if event.style else scalars.read(event.value)
        except ValueError as error:
            wrong = f"holds {short_repr(event.value)}, which {error}"
            self.refuse(event, wrong, "write it another way, or in quotes if it is text")


class _Writer:
    """Write a value as lines of block-style YAML, one key or item on each.

    Not by `yaml.dump`: PyYAML's own emitter is forty times as slow, libyaml's rejects surrogates,
    and the two write different bytes, so a recipe would depend on the machine that wrote it.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def value(self, value: object, path: tuple, *, head: str, pad: str) -> None:
        """Append `value`: its first line after `head`, the others after `pad`."""
        self.count += 1
        if self.count > MAX_VALUES:
            _unfit(path, f"is past the first {MAX_VALUES:,} keys and values", SHORTER)
        if type(value) in (dict, list) and len(path) >= MAX_DEPTH:
            _unfit(path, f"is more than {MAX_DEPTH} levels deep", "nest less")
        if type(value) is dict and value:
            self.pairs(value, path, head=head, pad=pad)
        elif type(value) is list and value:
            for index, item in enumerate(value):
                self.value(item, (*path, index), head=f"{head}- ", pad=f"{pad}  ")
                head = pad
        else:
            self.lines.append(head + _scalar(value, path))

    def pairs(self, value: dict, path: tuple, *, head: str, pad: str) -> None:
        for key, item in value.items():
            if type(key) is not str:
                _unfit(path, f"holds a key that is {kind_of(key)}", "use strings")
            if wrong := key_trouble(key):
                _unfit(path, wrong, "rename it")
            self.count += 1
            name = _scalar(key, (*path, key))
            # The key of "key: value" may have at most 1,024 characters; "? key" has no such limit.
            head += f"{name}:" if len(name) <= _MAX_SIMPLE_KEY else f"? {name}\n{pad}:"
            inner = {"head": f"{pad}  ", "pad": f"{pad}  "}
            if type(item) in (dict, list) and item:
                self.lines.append(head)
            else:
                inner["head"] = f"{head} "
            self.value(item, (*path, key), **inner)
            head = pad


def _scalar(value: object, path: tuple) -> str:
    try:
        return scalars.write(value)
    except ValueError as error:
        remedy = "use null, true, false, finite numbers, strings, lists and dicts"
        raise RecipeError(dotted(path), str(error), remedy) from None


def _unfit(path: tuple, wrong: str, remedy: str) -> NoReturn:
    raise RecipeError(dotted(path), wrong, remedy)


def _decoded(text: str | bytes, where: str) -> str:
    """Decode a recipe; raise RecipeError for bytes that are not UTF-8 and unprintable characters."""
    if isinstance(text, bytes):
        data = text
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise RecipeError(f"{where}:{line}", "is not UTF-8", "save it as UTF-8") from error
    if bad := UNPRINTABLE.search(text, text.startswith("\ufeff")):
        line = text.count("\n", 0, bad.start()) + 1
        wrong = f"holds the character U+{ord(bad[0]):04X}"
        raise RecipeError(f"{where}:{line}", wrong, "remove it, or escape it in double quotes")
    return text


def _check_size(text: str | bytes, where: str, *, verb: str = "is") -> None:
    if len(text if isinstance(text, bytes) else text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise RecipeError(where, f"{verb} larger than {MAX_BYTES:,} bytes", SHORTER)


def _loader_of(text: str) -> Any:
    """Return libyaml's loader where it reads this text, else PyYAML's own."""
    # Without escaped backslashes, every backslash that is left begins an escape.
    slow = _FAST is None or _SURROGATE.search(text.replace(r"\\", ""))
    return _SLOW if slow else _FAST
