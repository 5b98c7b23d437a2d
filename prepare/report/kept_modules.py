"""The modules that a tuning found to need float32: rows that the terminal and the page share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prepare.tune.records import Tuning


class KeptRow(NamedTuple):
    """A module, the 16-bit dtype, its errors in that and kept, and by how much it changes the time."""

    module: str
    dtype: str
    low: str
    kept: str
    time: str

    @property
    def sentence(self) -> str:
        """Return `head stays in float32: its error is 0.5 in bfloat16, 0.002 kept; +3 % time of a call`."""
        text = f"{self.module} stays in float32: its error is {self.low} in {self.dtype}, {self.kept} kept"
        return f"{text}; {self.time} time of a call" if self.time else text


def kept_rows(tuning: Tuning) -> list[KeptRow]:
    """Return a row for each module and dtype; recipes of one dtype keep the same modules."""
    found: dict[tuple[str, str], KeptRow] = {}
    for row in tuning.rows:
        dtype = str(row.steps.get("half", {}).get("dtype", ""))
        for each in row.kept:
            low = "infinite" if each.error is None else f"{each.error:.2g}"
            ratio = each.time_ratio
            cost = "" if ratio is None else f"{100 * (ratio - 1):+.0f} %"
            kept = KeptRow(each.module, dtype, low, f"{each.kept_error:.2g}", cost)
            found.setdefault((dtype, each.module), kept)
    return list(found.values())
