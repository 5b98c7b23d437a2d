"""The rows of a sweep as plain records, for your own tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prepare.app.sweep.ranking import rank
from prepare.app.sweep.summary import read_summary
from prepare.core.utils.text import plural
from prepare.errors import ConfigError


class SweepRows(list[dict[str, Any]]):
    """The rows of a sweep by number: a list of records that all have the same keys."""

    def __repr__(self) -> str:
        """Return one line: the records of a sweep fill pages."""
        rows = ", ".join(f"#{each['number']} {each['status']}" for each in self[:20])
        more = ", ..." if len(self) > 20 else ""
        return f"{plural(len(self), 'row')} of a sweep: {rows}{more}; to_dataframe() makes a table"

    def to_dataframe(self) -> Any:
        """Return the rows as a `pandas.DataFrame`, a column for each key.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas  # noqa: ICN001
        except ImportError as error:
            wrong = "needs the package pandas"
            raise ConfigError("to_dataframe", wrong, "install it: pip install pandas") from error
        return pandas.DataFrame(list(self))


def read(folder: str | Path) -> SweepRows:
    """Read the rows of the sweep in `folder`, also while it runs; nothing is written.

    A record has `number`, `status`, `best` and `shared` (booleans), `seconds`, `reason`, `folder` (the path
    of its run), every override under its key as the text that was given, and every figure of its result,
    such as `time_ratio` (below 1 is faster), `prepared_seconds`, `bytes_after` and `verified_error`. What a
    row does not have is None.

    Raises:
        FileError: `folder` is not that of a sweep.
    """
    folder = Path(folder)
    summary = read_summary(folder)
    best = rank(summary).best
    keys = dict.fromkeys(key for row in summary.rows for key in (*row.choices, *row.figures))
    return SweepRows(
        {
            **dict.fromkeys(keys),
            **row.figures,
            **row.choices,
            "number": row.number,
            "status": row.status,
            "best": row.number in best,
            "shared": row.shared,
            "seconds": row.seconds,
            "reason": row.reason,
            "folder": row.folder and str(folder / row.folder),
        }
        for row in summary.rows
    )
