"""Write and read records: JSON files that name their format and version."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from prepare.core.utils.files import printable_path, read_text, write_text

if TYPE_CHECKING:
    from prepare.errors import PrepareError

_T = TypeVar("_T")
_Parser = Callable[[Any], Any]


def write_json(path: str | os.PathLike, data: dict[str, Any], *, lines: bool = False) -> None:
    """Write `data` as ASCII JSON with its order of keys; raise ValueError for NaN and infinities.

    With `lines`, each key of `data` and each item of a list right under a key is on a separate
    line: this is faster, and a text diff shows which rows of a table differ. Raises FileError.
    """
    text = json_lines(data) if lines else json.dumps(data, indent=1, allow_nan=False)
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


def load(
    cls: type[_T],
    path: str | os.PathLike,
    kind: Kind,
    *,
    check: Callable[[_T], object] | None = None,
    parse: _Parser = json.loads,
    limit: int | None = None,
) -> _T:
    """Read an instance of `cls` from the JSON file at `path`.

    `cls` and the classes in its annotations are dataclasses or NamedTuples. The keys of each object must
    be the fields of its class; fields marked `late` may be absent. At the top level, `format`, `version`
    and properties of `cls` are ignored. `check` may raise ValueError or KeyError for a wrong instance.
    Annotations may hold `X | None`, `tuple[X, ...]`, `list[X]` and `dict[K, X]`; the types of
    single values are not checked. `parse` reads the text of a file that is not JSON; `limit` is the most
    bytes.

    Raises:
        FileError: the file cannot be read.
        kind.error: the file is of another kind or version, or does not hold a `cls`.
    """

    def make(data: dict[str, Any]) -> _T:
        derived = {key for key in data if isinstance(getattr(cls, key, None), property)}
        skipped = derived | kind.head.keys()
        record: _T = _parse_object(cls, {key: data[key] for key in data if key not in skipped})
        if check is not None:
            check(record)
        return record

    return read_record(path, kind, make, parse=parse, limit=limit)


def read_record(
    path: str | os.PathLike,
    kind: Kind,
    make: Callable[[dict[str, Any]], _T],
    *,
    parse: _Parser = json.loads,
    limit: int | None = None,
) -> _T:
    """Return `make(data)` for the content of the JSON file at `path`.

    Raises:
        FileError: the file cannot be read.
        kind.error: the file is of another kind or version, or `make` cannot use its content.
    """
    text = read_text(path, limit=limit)
    try:
        data = parse(text)
        if data["format"] != kind.format:
            raise kind.error(
                printable_path(path), f"this is a {data['format']}, not a {kind.format}"
            )
        if data["version"] != kind.version:
            wrong = f"version {data['version']!r} is not known here"
            raise kind.error(
                printable_path(path), wrong, f"this prepare reads version {kind.version}"
            )
        return make(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"this is not {kind.name}: {type(error).__name__}: {error}"
        raise kind.error(printable_path(path), wrong, f"give {kind.expected}") from error


def _parse_object(cls: type, data: Any) -> Any:
    """Build `cls` from a JSON object whose keys are its fields; those marked `late` may be absent."""
    parsers = _field_parsers(cls)
    if not isinstance(data, dict):
        raise TypeError(f"an object was expected, not {type(data).__name__}")
    if parsers.keys() - _late_fields(cls) - data.keys() or data.keys() - parsers.keys():
        raise ValueError(f"the keys are {sorted(data)}, not {sorted(parsers)}")
    given = ((key, parse) for key, parse in parsers.items() if parse is not None and key in data)
    parsed = {key: parse(data[key]) for key, parse in given}
    return cls(**(data | parsed))


@cache
def _late_fields(cls: type) -> frozenset[str]:
    if not is_dataclass(cls):
        return frozenset()
    return frozenset(each.name for each in fields(cls) if each.metadata.get("late"))


@cache
def _field_parsers(cls: type) -> dict[str, _Parser | None]:
    return {name: _parser(hint) for name, hint in get_type_hints(cls).items()}


def _parser(hint: Any) -> _Parser | None:
    """Return the function that turns a JSON value into a `hint`; None if the value needs no change."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        parsers = [parse for arg in args if (parse := _parser(arg)) is not None]
        return partial(_parse_optional, *parsers) if parsers else None
    if origin in (tuple, list):
        return partial(_parse_list, origin, _parser(args[0]))
    if origin is dict:
        return partial(_parse_dict, args[0], _parser(args[1]))
    is_record = is_dataclass(hint) or hasattr(hint, "_fields")
    return partial(_parse_object, hint) if is_record else None


def _parse_optional(parse: _Parser, value: Any) -> Any:
    return None if value is None else parse(value)


def _parse_list(sequence: type, parse: _Parser | None, value: Any) -> Any:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {type(value).__name__}")
    return sequence(value if parse is None else map(parse, value))


def _parse_dict(key: type, parse: _Parser | None, value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError(f"an object was expected, not {type(value).__name__}")
    return {key(name): item if parse is None else parse(item) for name, item in value.items()}


def json_lines(data: dict) -> str:
    """Return ASCII JSON with each key, and each item of a list right under a key, on a separate line."""
    members = []
    for key, value in data.items():
        if isinstance(value, (list, tuple)) and value:
            text = "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
        else:
            text = json.dumps(value, allow_nan=False)
        members.append(f"{json.dumps(str(key))}: {text}")
    return "{\n" + ",\n".join(members) + "\n}"
