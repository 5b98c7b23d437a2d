"""CSV as every reader can take it, whatever the names in it hold."""

import csv
from collections.abc import Iterable, Sequence
from typing import Any


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    r"""The rows as CSV, each ended by `\n`; None is an empty cell.

    Half of a pair of surrogates, which no UTF-8 can hold, is written as `\udc80`: JSON has it as it was.
    """
    lines = _Lines()
    # The writer quotes what its line end holds, and no more: with "\n" alone, a "\r" would break a row.
    csv.writer(lines, lineterminator="\r\n").writerows(rows)
    return "".join(lines).encode("utf-8", "backslashreplace").decode()


class _Lines(list[str]):
    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")
