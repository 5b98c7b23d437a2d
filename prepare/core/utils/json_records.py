"""Write, read and show records: JSON files that name their format and version."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from prepare.core.utils.files import printable_path, read_text, write_text
from prepare.core.utils.options import as_written, make
from prepare.core.utils.text import printable
from prepare.errors import FileError

_T = TypeVar("_T")
# The most bytes of a file; more than the record of a model of a hundred thousand tensors needs.
LIMIT = 1 << 26
# The most characters of a message that come from a file.
_LONGEST = 300
# The report reads records, so no record imports it: it is looked up when one is shown.
_REPORT = "prepare.app.report.objects"


class Readable:
    """A record whose `repr` is one line, and `str` the table of the command line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return importlib.import_module(_REPORT).one_line(self)

    def __str__(self) -> str:
        return importlib.import_module(_REPORT).text(self)


def write_json(path: str | os.PathLike, data: dict[str, Any]) -> None:
    """Write `data` as ASCII JSON, in lines. Raises FileError, and ValueError for NaN."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


class Kind(NamedTuple):
    """One kind of JSON record: its `format`, its name with an article (`an audit`), the file that is one."""

    format: str
    name: str
    expected: str

    @property
    def head(self) -> dict[str, Any]:
        """The first two members of such a file."""
        return {"format": self.format, "version": 1}


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
            FileError: the file cannot be read, or is of another kind or version.
        """

        def read(data: dict[str, Any]) -> Any:
            derived = {key for key in data if isinstance(getattr(cls, key, None), property)}
            skipped = derived | cls.KIND.head.keys()
            record = make(cls, {k: data[k] for k in data if k not in skipped})
            record.check()
            return record

        return read_record(path, cls.KIND, read).as_read()

    def as_read(self) -> Self:
        """Return it as its reader gets it."""
        return self

    def content(self) -> dict[str, Any]:
        """Return what the file holds after its format and version."""
        return asdict(self)  # type: ignore[call-overload]

    def check(self) -> None:
        """Raise ValueError, TypeError or KeyError if a record that was read contradicts itself."""


def read_record(path: str | os.PathLike, kind: Kind, read: Callable[[dict[str, Any]], _T]) -> _T:
    """Return `read(data)` for the content of the JSON file at `path`.

    Raises:
        FileError: it cannot be read, is of another kind or version, or `read` cannot use its content.
    """
    text, where = read_text(path, limit=LIMIT), printable_path(path)
    try:
        data = json.loads(text)
        if data["format"] != kind.format:
            raise FileError(where, f"this is {as_written(data['format'])}, not a {kind.format}")
        if data["version"] != 1:
            wrong = f"version {as_written(data['version'])} is not known here"
            raise FileError(where, wrong, "this prepare reads version 1")
        return read(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = printable("; ".join(map(str, error.args))[:_LONGEST])
        wrong = f"this is not {kind.name}: {type(error).__name__}: {text}"
        raise FileError(where, wrong, f"give {kind.expected}") from error
