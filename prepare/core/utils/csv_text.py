"""Write CSV that every reader accepts, whatever characters the names contain."""

import csv
from collections.abc import Iterable, Sequence
from typing import Any


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    r"""Return the rows as CSV, each ended by `\n`; None is an empty cell.

    A lone surrogate, which UTF-8 cannot encode, is written as `\udc80`.
    """
    lines = _Lines()
    # The csv writer quotes only the characters of its line end: with "\n" alone, "\r" would break a row.
    csv.writer(lines, lineterminator="\r\n").writerows(rows)
    return "".join(lines).encode("utf-8", "backslashreplace").decode()


class _Lines(list[str]):
    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")
