"""Write, read and show records: JSON files that name their format and version."""

from __future__ import annotations

import importlib
import json
import os
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from prepare.core.utils.files import printable_path, read_text, write_text
from prepare.core.utils.text import printable

if TYPE_CHECKING:
    from prepare.errors import PrepareError

_T = TypeVar("_T")
_Parser = Callable[[Any], Any]
# The most bytes of a file; more than the record of a model of a hundred thousand tensors needs.
LIMIT = 1 << 25
# The most characters of a message that come from a file.
_LONGEST = 300
# The report reads records, so no record imports it: it is looked up when one is shown.
_REPORT = "prepare.app.report.objects"
_LARGEST = 1 << 63
_NAMES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}


class Readable:
    """A record whose `repr` is one line, and `str` the table of the command line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _shown("one_line", self)

    def __str__(self) -> str:
        return _shown("text", self)


def write_json(path: str | os.PathLike, data: dict[str, Any], *, lines: bool = False) -> None:
    """Write `data` as ASCII JSON with its order of keys; raise ValueError for NaN and infinities.

    With `lines`, each key of `data` and each item of a list right under a key is on a separate
    line: this is faster, and a text diff shows which rows of a table differ. Raises FileError.
    """
    text = _lines(data) if lines else json.dumps(data, indent=1, allow_nan=False)
    write_text(path, text + "\n")


class Kind(NamedTuple):
    """One kind of JSON record: its `format` and `version`, and its name with an article (`an audit`).

    `expected` is the file to give in place of a wrong one, `error` the exception for a wrong one.
    """

    format: str
    version: int
    name: str
    expected: str
    error: type[PrepareError]

    @property
    def head(self) -> dict[str, Any]:
        """The first two members of such a file."""
        return {"format": self.format, "version": self.version}


class JsonRecord:
    """A dataclass that is the content of a JSON file: a subclass names its kind."""

    __slots__ = ()
    KIND: ClassVar[Kind]
    LIMIT: ClassVar[int] = LIMIT

    def save(self, path: str | os.PathLike) -> None:
        """Write it as JSON, atomically; equal records give equal bytes. Raises FileError."""
        write_json(path, self.KIND.head | self.content(), lines=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read it from its JSON file, without torch.

        The keys of each object must be the fields of its class; fields marked `late` may be absent. At the
        top level, `format`, `version` and properties are ignored. Annotations may hold `X | None`,
        dataclasses, NamedTuples, `tuple[X, ...]`, `tuple[X, X]`, `list[X]` and `dict[K, X]`. Every value must
        have the type of its annotation; numbers are finite, and below 2**63.

        Raises:
            FileError: the file cannot be read.
            PrepareError: the file is of another kind or version; the error of its kind.
        """

        def make(data: dict[str, Any]) -> Any:
            derived = {key for key in data if isinstance(getattr(cls, key, None), property)}
            skipped = derived | cls.KIND.head.keys()
            record = _parse_object(cls, {k: data[k] for k in data if k not in skipped})
            record.check()
            return record

        return read_record(path, cls.KIND, make, parse=cls.parse, limit=cls.LIMIT).as_read()

    @staticmethod
    def parse(text: str) -> Any:
        """Return the content of the text of a file."""
        return json.loads(text)

    def as_read(self) -> Self:
        """Return it as its reader gets it."""
        return self

    def content(self) -> dict[str, Any]:
        """Return what the file holds after its format and version."""
        return asdict(self)  # type: ignore[call-overload]

    def check(self) -> None:
        """Raise ValueError, TypeError or KeyError if a record that was read contradicts itself."""


def read_record(
    path: str | os.PathLike,
    kind: Kind,
    make: Callable[[dict[str, Any]], _T],
    *,
    parse: _Parser = json.loads,
    limit: int = LIMIT,
) -> _T:
    """Return `make(data)` for the content of the JSON file at `path`.

    Raises:
        FileError: the file cannot be read.
        kind.error: the file is of another kind or version, or `make` cannot use its content.
    """
    text, where = read_text(path, limit=limit), printable_path(path)
    try:
        data = parse(text)
        if data["format"] != kind.format:
            raise kind.error(where, f"this is a {_brief(data['format'])}, not a {kind.format}")
        if data["version"] != kind.version:
            wrong = f"version {_brief(repr(data['version']))} is not known here"
            raise kind.error(where, wrong, f"this prepare reads version {kind.version}")
        return make(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        place = ".".join(reversed(getattr(error, "__notes__", ())))
        wrong = f"this is not {kind.name}: {type(error).__name__}: {_brief(error)}"
        wrong += f", in {_brief(place)}" if place else ""
        raise kind.error(where, wrong, f"give {kind.expected}") from error


def _brief(value: object) -> str:
    text = str(value)
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def check_values(data: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if a value of `data` has not the type that `types` names for its key.

    A key may be missing if its type is `X | None`, and there may be other keys.
    """
    if not isinstance(data, dict):
        raise TypeError(f"an object was expected, not {type(data).__name__}")
    for key, hint in types.items():
        _at(key, _parser(hint), data.get(key))


def _parse_object(cls: type, data: Any) -> Any:
    """Build `cls` from a JSON object whose keys are its fields; those marked `late` may be absent."""
    parsers, late = _fields_of(cls)
    if not isinstance(data, dict):
        raise TypeError(f"an object was expected, not {type(data).__name__}")
    if parsers.keys() - late - data.keys() or data.keys() - parsers.keys():
        raise ValueError(f"the keys are {sorted(data)}, not {sorted(parsers)}")
    return cls(**{key: _at(key, parsers[key], value) for key, value in data.items()})


def _at(key: Any, parse: _Parser, value: Any) -> Any:
    """Return the parsed value; the notes of an error are the keys of its place, the innermost first."""
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        error.add_note(str(key))
        raise


@cache
def _fields_of(cls: type) -> tuple[dict[str, _Parser], frozenset[str]]:
    """Return the parser of each field, and the names of those that may be absent."""
    hints = typing.get_type_hints(cls).items()
    declared = fields(cls) if is_dataclass(cls) else ()
    parsers = {n: _parser(hint) for n, hint in hints if typing.get_origin(hint) is not ClassVar}
    return parsers, frozenset(each.name for each in declared if each.metadata.get("late"))


def _parser(hint: Any) -> _Parser:
    """Return the function that turns a JSON value into a `hint`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        (parse,) = (_parser(arg) for arg in args if arg is not NoneType)
        return lambda value: None if value is None else parse(value)
    if origin in (tuple, list):
        length = len(args) if origin is tuple and args[-1] is not Ellipsis else None
        return partial(_parse_list, origin, _parser(args[0]), length)
    if origin is dict:
        return partial(_parse_dict, args[0], _parser(args[1]))
    if hint in _NAMES:
        return partial(_parse_scalar, hint)
    is_record = is_dataclass(hint) or hasattr(hint, "_fields")
    return partial(_parse_object, hint) if is_record else lambda value: value


def _parse_scalar(kind: type, value: Any) -> Any:
    # Not isinstance: true is no number.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{_NAMES[kind]} was expected, not {type(value).__name__}")
    if isinstance(value, (int, float)) and not -_LARGEST < value < _LARGEST:
        raise ValueError("the number is not finite, or too large")
    return value


def _parse_list(sequence: type, parse: _Parser, length: int | None, value: Any) -> Any:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {type(value).__name__}")
    if length is not None and len(value) != length:
        raise ValueError(f"{length} values were expected, not {len(value)}")
    return sequence(_at(index, parse, item) for index, item in enumerate(value))


def _parse_dict(key: type, parse: _Parser, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"an object was expected, not {type(value).__name__}")
    return {key(name): _at(name, parse, item) for name, item in value.items()}


def _lines(data: dict) -> str:
    """Return ASCII JSON with each key, and each item of a list right under a key, on a separate line."""
    members = []
    for key, value in data.items():
        if isinstance(value, (list, tuple)) and value:
            items = ",\n".join(json.dumps(item, allow_nan=False) for item in value)
            text = f"[\n{items}\n]"
        else:
            text = json.dumps(value, allow_nan=False)
        members.append(f"{json.dumps(str(key))}: {text}")
    return "{\n" + ",\n".join(members) + "\n}"


def _shown(form: str, record: Readable) -> Any:
    return getattr(importlib.import_module(_REPORT), form)(record)
