"""Write CSV that every reader accepts, whatever characters the names contain."""

import csv
import re
from collections.abc import Iterable, Sequence
from typing import Any

# A spreadsheet takes a cell that begins so as a formula, unless it is a number.
_FORMULA = re.compile(r"(?![-+][0-9.]+(e[-+]?[0-9]+)?$)[=+\-@\t\r]", re.IGNORECASE)


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    r"""Return the rows as CSV, each ended by `\n`; None is an empty cell.

    A lone surrogate, which UTF-8 cannot encode, is written as `\udc80`. A text that a spreadsheet would
    take as a formula begins with `'`; numbers stay as they are.
    """
    lines = _Lines()
    # The csv writer quotes only the characters of its line end: with "\n" alone, "\r" would break a row.
    csv.writer(lines, lineterminator="\r\n").writerows(map(_plain, row) for row in rows)
    return "".join(lines).encode("utf-8", "backslashreplace").decode()


def _plain(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


class _Lines(list[str]):
    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")
