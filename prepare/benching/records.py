"""What a bench found, as plain data: saved to and loaded from `bench.json` without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from prepare import files
from prepare.errors import BenchError

FORMAT, VERSION = "prepare.bench", 1
VERDICTS = (
    "baseline",
    "faster",
    "slower",
    "no significant difference",
    "failed",
    "not compared",  # the baseline itself failed
)
Interval = tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant. What could not be found out is None.

    `seconds` is the median time of one call, `ratio` the median of the paired ratios to the baseline
    (below 1 is faster); each with its interval. `throughput` is items a second, `peak_bytes` the most
    that one call held beyond what was there before. `samples` are the seconds of a call in each
    round, each the mean of `calls` calls. `reason` says why it failed.
    """

    name: str
    verdict: str
    seconds: float | None = None
    seconds_interval: Interval = None
    ratio: float | None = None
    ratio_interval: Interval = None
    throughput: float | None = None
    peak_bytes: int | None = None
    device: str = ""
    calls: int = 0
    samples: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The baseline against itself (A/A): what a ratio is where nothing differs.

    `noise` 1.03 says that ratios between 1/1.03 and 1.03 are no significant difference. None where
    there were too few rounds for an interval: then nothing is significant.
    """

    ratio: float
    interval: Interval
    noise: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a bench is: `precision` is that of the least precise ratio, None before there is one."""

    doing: str
    rounds: int
    seconds: float
    budget: float
    precision: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variants timed against a baseline.

    `repeats` rounds took `seconds`, warm-up and all. `aa` is None where the baseline failed.
    `settings` say how it was measured, `environment` where, and `notes` what to bear in mind.
    """

    rows: tuple[Row, ...]
    baseline: str
    aa: Control | None
    repeats: int
    seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of that variant; KeyError where there is none."""
        return {row.name: row for row in self.rows}[name]

    def save(self, path: str | Path) -> None:
        """Writes `bench.json`, whole or not at all. Raises FileError."""
        data = {"format": FORMAT, "version": VERSION} | asdict(self)
        files.write_json(path, data, lines=True)

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """A comparison from its JSON; torch is not needed.

        Raises:
            BenchError: the file is no bench, or one of another version.
        """
        text = files.read_text(path)
        try:
            return cls._read(json.loads(text), str(path))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            wrong = f"this is no bench: {type(error).__name__}: {error}"
            raise BenchError(str(path), wrong, "give a bench.json") from error

    @classmethod
    def _read(cls, data: Mapping[str, Any], path: str) -> Comparison:
        if data["format"] != FORMAT:
            raise BenchError(path, f"this is a {data['format']}, not a {FORMAT}")
        if data["version"] != VERSION:
            wrong = f"version {data['version']!r} is not known here"
            raise BenchError(path, wrong, f"this prepare reads version {VERSION}")
        rows = tuple(_record(Row, row) for row in data["rows"])
        if unknown := {row.verdict for row in rows} - {*VERDICTS}:
            raise ValueError(f"no verdict is called {min(unknown)!r}")
        return cls(
            rows=rows,
            aa=None if data["aa"] is None else _record(Control, data["aa"]),
            settings=dict(data["settings"]),
            environment=dict(data["environment"]),
            notes=tuple(data["notes"]),
            **{key: data[key] for key in ("baseline", "repeats", "seconds")},
        )


def _record(kind: type, found: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    if names != found.keys():
        raise ValueError(f"a row holds {sorted(found)}, not {sorted(names)}")
    return kind(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    )
