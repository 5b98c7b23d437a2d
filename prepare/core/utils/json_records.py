"""Write, read and show records: JSON files that name their format and version."""

from __future__ import annotations

import importlib
import json
import os
import typing
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from prepare.core.utils.files import printable_path, read_text, write_text
from prepare.core.utils.text import printable

if TYPE_CHECKING:
    from prepare.errors import PrepareError

_T = TypeVar("_T")
# The most bytes of a file; more than the record of a model of a hundred thousand tensors needs.
LIMIT = 1 << 25
# The most characters of a message that come from a file.
_LONGEST = 300
# The report reads records, so no record imports it: it is looked up when one is shown.
_REPORT = "prepare.app.report.objects"
_LARGEST = 1 << 63
_NAMES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_NAMES |= {dict: "an object", list: "a list"}


class Readable:
    """A record whose `repr` is one line, and `str` the table of the command line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return importlib.import_module(_REPORT).one_line(self)

    def __str__(self) -> str:
        return importlib.import_module(_REPORT).text(self)


def write_json(path: str | os.PathLike, data: dict[str, Any]) -> None:
    """Write `data` as ASCII JSON, each member and each item of a list in it on a line of its own.

    A text diff then shows which rows of a table differ. Raises FileError, and ValueError for NaN.
    """
    members = []
    for key, value in data.items():
        if isinstance(value, list | tuple) and value:
            items = ",\n".join(json.dumps(item, allow_nan=False) for item in value)
            members.append(f"{json.dumps(str(key))}: [\n{items}\n]")
        else:
            members.append(f"{json.dumps(str(key))}: {json.dumps(value, allow_nan=False)}")
    write_text(path, "{\n" + ",\n".join(members) + "\n}\n")


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

    def save(self, path: str | os.PathLike) -> None:
        """Write it as JSON, atomically; equal records give equal bytes. Raises FileError."""
        write_json(path, self.KIND.head | self.content())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read it from its JSON file, without torch.

        The keys of each object must be the fields of its class; those with a default may be absent. At the
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

        return read_record(path, cls.KIND, make).as_read()

    def as_read(self) -> Self:
        """Return it as its reader gets it."""
        return self

    def content(self) -> dict[str, Any]:
        """Return what the file holds after its format and version."""
        return asdict(self)  # type: ignore[call-overload]

    def check(self) -> None:
        """Raise ValueError, TypeError or KeyError if a record that was read contradicts itself."""


def read_record(path: str | os.PathLike, kind: Kind, make: Callable[[dict[str, Any]], _T]) -> _T:
    """Return `make(data)` for the content of the JSON file at `path`.

    Raises:
        FileError: the file cannot be read.
        kind.error: the file is of another kind or version, or `make` cannot use its content.
    """
    text, where = read_text(path, limit=LIMIT), printable_path(path)
    try:
        data = json.loads(text)
        if data["format"] != kind.format:
            raise kind.error(where, f"this is a {_brief(data['format'])}, not a {kind.format}")
        if data["version"] != kind.version:
            wrong = f"version {_brief(repr(data['version']))} is not known here"
            raise kind.error(where, wrong, f"this prepare reads version {kind.version}")
        return make(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"this is not {kind.name}: {type(error).__name__}: {_brief(error)}"
        raise kind.error(where, wrong, f"give {kind.expected}") from error


def _brief(value: object) -> str:
    text = str(value)
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def _parse_object(cls: type, data: Any) -> Any:
    """Build `cls` from a JSON object whose keys are its fields; those with a default may be absent."""
    hints, needed = _fields_of(cls)
    _require(dict, data)
    if needed - data.keys() or data.keys() - hints.keys():
        raise ValueError(f"the keys are {sorted(data)}, not {sorted(hints)}")
    return cls(**{key: _parse(hints[key], value) for key, value in data.items()})


@cache
def _fields_of(cls: type) -> tuple[dict[str, Any], set[str]]:
    """Return the type of each field, and the names of those without a default."""
    hints = typing.get_type_hints(cls)
    hints = {name: hints[name] for name in hints if typing.get_origin(hints[name]) is not ClassVar}
    declared = fields(cls) if is_dataclass(cls) else ()
    optional = {f.name for f in declared if (f.default, f.default_factory) != (MISSING, MISSING)}
    return hints, hints.keys() - optional


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


def _parse(hint: Any, value: Any) -> Any:
    """Return a JSON value as a `hint`."""
    origin, args = _parts(hint)
    if origin in (typing.Union, UnionType):
        return None if value is None else _parse(args[0], value)
    if origin is dict:
        _require(dict, value)
        return {args[0](name): _parse(args[1], item) for name, item in value.items()}
    if origin in (tuple, list):
        _require(list, value)
        if origin is tuple and args[-1] is not Ellipsis and len(value) != len(args):
            raise ValueError(f"{len(args)} values were expected, not {len(value)}")
        return origin(_parse(args[0], item) for item in value)
    if hint in (str, bool, int, float):
        _require(hint, value)
        if hint in (int, float) and not -_LARGEST < value < _LARGEST:
            raise ValueError("the number is not finite, or too large")
        return value
    return _parse_object(hint, value) if is_dataclass(hint) or hasattr(hint, "_fields") else value


def _require(kind: type, value: Any) -> None:
    # Not isinstance: true is no number.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{_NAMES[kind]} was expected, not {type(value).__name__}")
