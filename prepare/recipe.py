r"""Recipes: the steps of a pipeline as one plain YAML file, read as data and never as code.

A recipe is `{format: prepare.recipe, version: 1, steps: {name: {option: value}}}` and nothing else.
It is built from the parser's events, so nothing that a file names is constructed, imported, opened
or looked up. Tags, anchors, aliases, directives, merge keys, `${`, keys that begin with `_`, a key
given twice and a second document are refused, each with its line.

Values without quotes mean what YAML 1.2's core schema says: `on`, `yes` and `1:30` are strings. Any
that the command line would take for another type (`010`, `1_000`, `nan`, `nUll`) is refused; only
`0x1f` and `0o17` are integers here and text there. Numbers are finite, integers have at most 64
bits. Which steps and options exist is for the Pipeline to say.

Limits: 1 MiB, 32 levels, 5,000 keys and values. PyYAML's own parser is slow, so 64 KiB where it
has to be used: where libyaml is missing, and for escaped surrogates, which libyaml does not take.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import NoReturn

import yaml

from prepare import files
from prepare.errors import FileError, Problem, RecipeError, choose, nearest

FORMAT = "prepare.recipe"
VERSION = 1
_KEYS = {"format": FORMAT, "version": VERSION, "steps": "{name: {option: value}}"}

MAX_BYTES = 1 << 20
MAX_BYTES_SLOW = 1 << 16
MAX_DEPTH = 32
MAX_VALUES = 5_000
MAX_PROBLEMS = 20
AMBIGUOUS = "means one thing in YAML and another on the command line"
SHORTER = "use patterns in place of lists of names"
INTEGERS = range(-(1 << 63), 1 << 64)

# Loaders are only asked for their events here; none of their constructors ever runs.
_FAST, _SLOW = getattr(yaml, "CSafeLoader", None), yaml.SafeLoader
_SURROGATE = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
# The breaks of YAML 1.1 that are none in 1.2 (U+0085, U+2028, U+2029) count as unprintable.
_UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
_DIRECTIVE = re.compile(r"(?:\A|[\r\n])%")

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
_MAX_SIMPLE_KEY = 1000


def load(path: str | os.PathLike) -> dict:
    """The steps of the recipe at `path`: `{name: {option: value} or None}`; raises RecipeError."""
    try:
        data = files.read_bytes(path, limit=MAX_BYTES)
    except FileError as error:
        raise RecipeError.of(error.problems) from error
    return loads(data, where=files.shown(path))


def loads(text: str | bytes, *, where: str = "recipe") -> dict:
    """The steps of the recipe `text`; raises RecipeError, whose places begin with `where`."""
    if len(text) > MAX_BYTES:
        raise RecipeError(where, f"is larger than {MAX_BYTES:,} bytes", SHORTER)
    text = _decoded(text, where).removeprefix("\ufeff")
    loader, limit = _checked_size(text, where)
    reader = _Reader(yaml.parse(text, Loader=loader), text, where)
    steps = _steps(reader.document(), reader.at)
    # Indentation and escapes can make it longer when it is written, and it has to be readable then.
    if 4 * len(text.encode()) + 100 * reader.count > limit:
        _text(steps, where)
    return steps


def save(path: str | os.PathLike, steps: dict) -> None:
    """Write `steps` as a recipe, whole or not at all; raises RecipeError and FileError."""
    files.write_text(path, dumps(steps))


def dumps(steps: dict) -> str:
    """The canonical text of a recipe with these steps; `loads` gives exactly them back.

    Raises RecipeError, which names the path of what is not plain data: `steps.half.keep[1]`.
    """
    if problems := _step_problems(steps, _dotted):
        raise RecipeError.of(problems[:MAX_PROBLEMS])
    return _text(steps, "steps")


class _Reader:
    """Builds the value of one YAML document from its events and refuses all that is not data."""

    def __init__(self, events: Iterator[yaml.Event], text: str, where: str) -> None:
        self.events, self.text, self.where = events, text, where
        self.count = 0
        self.lines: dict[tuple, int] = {}

    def at(self, keys: tuple) -> str:
        """Where a key of the document, or of its steps, stands."""
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
        # PyYAML's own parser lets chr() and int() raise on wild escapes and version numbers.
        except (ValueError, OverflowError) as error:
            wrong = "is not YAML: an escape or a version is out of range"
            raise RecipeError(self.where, wrong, "correct it") from error

    def document(self) -> object:
        self.next()
        start = self.next()
        if isinstance(start, yaml.StreamEndEvent):
            raise RecipeError(self.where, "is empty", f"a recipe begins with 'format: {FORMAT}'")
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

    def items(self, path: tuple) -> list:
        result = []
        while not isinstance(event := self.next(), yaml.SequenceEndEvent):
            result.append(self.value(event, (*path, len(result))))
        return result

    def pairs(self, path: tuple) -> dict:
        result, lines = {}, {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            key = self.key(event)
            if key in result:
                wrong = f"holds the key {_short(key)} again, first in line {lines[key]}"
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
            wrong = f"holds the key {_short(event.value)}, which is {_kind(key)}"
            self.refuse(event, wrong, "put quotes around it")
        if wrong := _key_trouble(key):
            self.refuse(event, wrong, "remove it")
        return key

    def inspect(self, event: yaml.Event) -> None:
        """Refuse what stands for something else than itself, and too much of anything."""
        if isinstance(event, yaml.AliasEvent):
            self.refuse(event, f"holds the alias {_short('*' + event.anchor)}", "repeat the value")
        if event.anchor is not None:
            self.refuse(event, f"holds the anchor {_short('&' + event.anchor)}", "remove it")
        if event.tag is not None:
            self.refuse(event, f"holds the tag {_short(event.tag)}", "write plain data")
        self.count += 1
        if self.count > MAX_VALUES:
            self.refuse(event, f"is past the first {MAX_VALUES:,} keys and values", SHORTER)

    def scalar(self, event: yaml.ScalarEvent) -> object:
        if "${" in event.value:
            self.refuse(event, f"holds '${{' in {_short(event.value)}", "write the value itself")
        try:
            return event.value if event.style else _plain(event.value)
        except ValueError as error:
            wrong = f"holds {_short(event.value)}, which {error}"
            self.refuse(event, wrong, "write it another way, or in quotes if it is text")


class _Writer:
    """Writes a value as lines of block-style YAML, one key or item on each."""

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
                _unfit(path, f"holds a key that is {_kind(key)}", "use strings")
            if wrong := _key_trouble(key):
                _unfit(path, wrong, "rename it")
            self.count += 1
            name = _scalar(key, (*path, key))
            # The key of "key: value" may have 1,024 characters; "? " lifts that.
            head += f"{name}:" if len(name) <= _MAX_SIMPLE_KEY else f"? {name}\n{pad}:"
            inner = {"head": f"{pad}  ", "pad": f"{pad}  "}
            if type(item) in (dict, list) and item:
                self.lines.append(head)
            else:
                inner["head"] = f"{head} "
            self.value(item, (*path, key), **inner)
            head = pad


def _text(steps: dict, where: str) -> str:
    writer = _Writer()
    writer.value({"format": FORMAT, "version": VERSION, "steps": steps}, (), head="", pad="")
    text = "\n".join(writer.lines) + "\n"
    _checked_size(text, where, verb="would be")
    return text


def _decoded(text: str | bytes, where: str) -> str:
    """The characters of a recipe; only printable ones."""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            line = text.count(b"\n", 0, error.start) + 1
            raise RecipeError(f"{where}:{line}", "is not UTF-8", "save it as UTF-8") from error
    if bad := _UNPRINTABLE.search(text, text.startswith("\ufeff")):
        line = text.count("\n", 0, bad.start()) + 1
        wrong = f"holds the character U+{ord(bad[0]):04X}"
        raise RecipeError(f"{where}:{line}", wrong, "remove it, or escape it in double quotes")
    return text


def _checked_size(text: str, where: str, *, verb: str = "is") -> tuple[type, int]:
    """The parser for this text and the bytes that it may be given; RecipeError if it has more."""
    loader, limit, remedy = _FAST, MAX_BYTES, SHORTER
    # An escaped backslash escapes nothing; without those, every backslash that is left does.
    if _FAST is None or _SURROGATE.search(text.replace(r"\\", "")):
        loader, limit = _SLOW, MAX_BYTES_SLOW
        remedy = "remove the escaped surrogates" if _FAST else "install PyYAML with libyaml"
    if len(text.encode()) > limit:
        raise RecipeError(where, f"{verb} larger than {limit:,} bytes", remedy)
    return loader, limit


def _plain(text: str) -> object:
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


def _integer(text: str) -> int:
    # Python refuses to convert more than 4,300 decimal digits, with a ValueError of its own.
    digits = text[2:].lstrip("0") if text[1:2] in ("o", "x") else text
    if len(digits) > 22 or (number := int(text, 0)) not in INTEGERS:
        raise ValueError("has more than 64 bits")
    return number


def _steps(tree: object, at: Callable[[tuple], str]) -> dict:
    """The steps of a recipe's whole content; all that is wrong around them in one RecipeError."""
    if not isinstance(tree, dict):
        remedy = f"a recipe begins with 'format: {FORMAT}'"
        raise RecipeError(at(()), f"is {_kind(tree)}, not a mapping", remedy)
    version = tree.get("version")
    if tree.get("format") == FORMAT and type(version) is int and version > VERSION:
        wrong = f"has version {version}, and this prepare reads version {VERSION}"
        raise RecipeError(at(("version",)), wrong, "upgrade prepare")
    problems = [*_header_problems(tree, at)]
    if "steps" in tree:
        problems += _step_problems(tree["steps"], at)
    if problems:
        raise RecipeError.of(problems[:MAX_PROBLEMS])
    return tree["steps"]


def _header_problems(tree: dict, at: Callable[[tuple], str]) -> list[Problem]:
    """Unknown, missing and wrong top-level keys; a misspelt key is not also a missing one."""
    unknown = [key for key in tree if key not in _KEYS][:MAX_PROBLEMS]
    missing = [key for key in _KEYS if key not in tree]
    guesses = [guess for key in unknown for guess in nearest(key, missing)[:1]]
    problems = [
        Problem(at((key,)), f"unknown key {_short(key)}", choose(key, _KEYS)) for key in unknown
    ]
    problems += [
        Problem(at(()), f"the key '{key}' is missing", f"add '{key}: {_KEYS[key]}'")
        for key in missing
        if key not in guesses
    ]
    for key, right in (("format", FORMAT), ("version", VERSION)):
        # 1.0 and True equal 1, and are no version.
        if key in tree and (tree[key] != right or type(tree[key]) is not type(right)):
            wrong = f"the {key} is {_short(tree[key])}, not {_short(right)}"
            problems.append(Problem(at((key,)), wrong, f"write '{key}: {right}'"))
    return problems


def _step_problems(steps: object, at: Callable[[tuple], str]) -> list[Problem]:
    if type(steps) is not dict:
        remedy = "write 'steps: {name: {option: value}}'"
        return [Problem(at(("steps",)), f"'steps' is {_kind(steps)}, not a mapping", remedy)]
    remedy = "write its options as 'option: value', or null to drop the step"
    return [
        Problem(at(("steps", name)), f"the step {_short(name)} is {_kind(options)}", remedy)
        for name, options in steps.items()
        if options is not None and type(options) is not dict and type(name) is str
    ]


def _key_trouble(key: str) -> str:
    """Why no key of a recipe may be `key`: what other readers of YAML or Hydra would act on."""
    if key.startswith("_"):
        return f"holds the key {_short(key)}: no key of a recipe begins with '_'"
    return "holds the merge key '<<'" if key == "<<" else ""


def _scalar(value: object, path: tuple) -> str:
    """The text of a value that is written on one line."""
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
    remedy = "use null, true, false, finite numbers, strings, lists and dicts"
    raise RecipeError(_dotted(path), _why_unfit(value), remedy)


def _why_unfit(value: object) -> str:
    if type(value) is str:
        return f"holds '${{' in {_short(value)}"
    if type(value) is int:
        return "has more than 64 bits"
    return "is not finite" if type(value) is float else f"is {_kind(value)}"


def _quoted(text: str) -> str:
    """In double quotes; JSON's escapes mean the same in YAML, but for pairs of surrogates."""
    escaped = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda bad: f"\\u{ord(bad[0]):04x}", escaped)


def _unfit(path: tuple, wrong: str, remedy: str) -> NoReturn:
    raise RecipeError(_dotted(path), wrong, remedy)


def _dotted(path: tuple) -> str:
    """`("steps", "half", "keep", 1)` as `steps.half.keep[1]`; odd keys in quotes."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            simple = _PLAIN.fullmatch(key) and len(key) <= 60
            text += "." * bool(text) + (key if simple else _short(key))
    return text


def _short(value: object) -> str:
    """A value as one short line; a cut string shows that it is one."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else ascii(value[:60]) + "..."
    return _kind(value) if isinstance(value, dict | list | tuple) else ascii(value)[:60]


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    kinds = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "a mapping"}
    return kinds.get(type(value)) or f"of type {type(value).__name__}"
