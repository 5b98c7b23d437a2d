"""Write and read records: JSON files that name their format and version."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from prepare.core.utils.files import read_text, shown, write_text

if TYPE_CHECKING:
    from prepare.errors import PrepareError


_T = TypeVar("_T")


def write_json(path: str | os.PathLike, data: object, *, lines: bool = False) -> None:
    """Write `data` as ASCII JSON, keys in the order given; NaN and infinities are a ValueError.

    With `lines`, `data` is a dict, and each of its keys and each item of a list right under a key
    is on one line of its own: for tables, where that is faster and compares well. Raises FileError.
    """
    text = json_lines(data) if lines else json.dumps(data, indent=1, allow_nan=False)
    write_text(path, text + "\n")


class Kind(NamedTuple):
    """A kind of JSON file of ours: its `format` and `version`, what it is (`an audit` without the `an`).

    `give` is what to give in the place of another file, `error` what is raised for one.
    """

    format: str
    version: int
    noun: str
    give: str
    error: type[PrepareError]

    @property
    def head(self) -> dict[str, Any]:
        """What such a file begins with."""
        return {"format": self.format, "version": self.version}


def read_record(path: str | os.PathLike, kind: Kind, make: Callable[[dict[str, Any]], _T]) -> _T:
    """What `make` makes of the JSON file at `path`.

    Raises:
        FileError: the file cannot be read.
        kind.error: it is of another kind or version, or holds something else than `make` expects.
    """
    text = read_text(path)
    try:
        data = json.loads(text)
        if data["format"] != kind.format:
            raise kind.error(shown(path), f"this is a {data['format']}, not a {kind.format}")
        if data["version"] != kind.version:
            wrong = f"version {data['version']!r} is not known here"
            raise kind.error(shown(path), wrong, f"this prepare reads version {kind.version}")
        return make(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"this is no {kind.noun}: {type(error).__name__}: {error}"
        raise kind.error(shown(path), wrong, f"give {kind.give}") from error


def json_lines(data: dict) -> str:
    """ASCII JSON with each key, and each item of a list right under a key, on one line of its own."""
    members = []
    for key, value in data.items():
        if isinstance(value, (list, tuple)) and value:
            text = "[\n" + ",\n".join(json.dumps(item, allow_nan=False) for item in value) + "\n]"
        else:
            text = json.dumps(value, allow_nan=False)
        members.append(f"{json.dumps(str(key))}: {text}")
    return "{\n" + ",\n".join(members) + "\n}"
